"""Attention of a step's tokens in Triton: its query tiles, and which way each kind of them goes.

Flow:    queries, cache, lengths of the step -> [attend_step] -> attend, for sequences of few queries and for others

As in `xla.walks`, sequences of few queries are one query tile each, and the others are cut into query tiles of as many
rows as a program has. Where these alone do not fill a card, KV tiles are shared out among lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import cdiv
from pallas_kernels.paged_tiles import column_tokens
from pallas_kernels.schedule import Batch, QueryTile, few_queries, query_tiles
from pallas_kernels.triton.attend import Sizes, Tokens, attend
from pallas_kernels.triton.call import power_from, reason_of_pages
from pallas_kernels.varying import vary_like
from pallas_kernels.xla.walks import Results, Step


@dataclass(frozen=True)
class Limits:
    """How the work of a step is cut."""

    programs: int = 432  # that fill a card: four for each of an A100's 108 multiprocessors
    few_tiles: int = 4  # of KV, that are not worth sharing out
    most_keys: int = 64  # of a KV tile


def reason_not_supported(pages: tuple[jax.Array, ...], is_split: bool = True) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    if not is_split:
        return "Triton kernels read split K and V pages, got packed ones"
    return reason_of_pages(pages)


class Walk(NamedTuple):
    """Query tiles of one size."""

    name: str
    tiles: QueryTile  # int32[room] each
    sizes: Sizes


def attend_step(step: Step, batch: Batch, pages: tuple[jax.Array, jax.Array | None], limits: Limits) -> Results:
    """Attention of all tokens [T, Hkv, G, ...] over all keys that each sees; 0 and -inf for those that see none.

    `pages` are keys [pages, slots, Hkv, D] and values likewise, or [pages, slots, D] and None where there is one head
    whose values are the first numbers of its keys.
    """
    rows, cache = step.queries.q.shape[:3], step.cache
    by_token = (rows[0], rows[1] * rows[2])
    results = (jnp.zeros((*by_token, cache.head_dim_v), step.dtype), jnp.full(by_token, -jnp.inf))
    results = vary_like(results, step.queries.q, *batch, *cache.pages, cache.block_tables)
    q = step.queries.q.reshape(*by_token, -1)
    scales = (step.queries.scale, step.v_scale)
    tokens = Tokens(q, *pages, cache.block_tables, *scales, step.sinks, cache.share)
    for walk in plan_walks(step, batch, limits):
        with jax.named_scope(walk.name):
            results = attend(tokens, walk.tiles, results, step.mask, step.queries.soft_cap, cache.page_size, walk.sizes)
    out, lse = results
    return out.reshape(*rows, -1), lse.reshape(rows)


def plan_walks(step: Step, batch: Batch, limits: Limits = Limits()) -> list[Walk]:
    """The walks of a step: over sequences of few queries, and over query tiles of the others if it can have any."""
    num_tokens, num_kv_heads, group, dim = step.queries.q.shape
    num_seqs, table_keys = batch.seq_lens.shape[0], step.cache.page_size * step.cache.block_tables.shape[1]
    most_rows = _most_rows(dim, step.queries.q.dtype)
    most = most_rows // min(most_rows, power_from(group))
    few = few_queries(num_tokens, num_seqs, most)
    is_short = batch.q_lens <= few
    kinds = [("short", few, num_seqs, is_short)]
    if num_tokens > few:
        kinds.append(("long", most, min(num_tokens, num_tokens // most + num_seqs), ~is_short))
    walks = []
    for name, queries, room, is_own in kinds:
        own = batch._replace(q_lens=jnp.where(is_own, batch.q_lens, 0))
        tiles, _ = query_tiles(own, step.mask, room=room, queries=queries, page_size=column_tokens(step.cache))
        heads = min(power_from(group), most_rows // queries)
        keys = min(limits.most_keys, _most_keys(dim, step.queries.q.dtype, step.cache.pages[0].dtype))
        width = num_kv_heads * cdiv(group, heads)
        fills = name == "long" and room * width >= limits.programs
        lanes = None if fills or table_keys <= limits.few_tiles * keys else max(1, limits.programs // width)
        num_warps = 8 if queries * heads * dim * step.queries.q.dtype.itemsize >= 64 * 128 * 2 else 4
        sizes = Sizes(queries, heads, keys, lanes, num_warps, num_stages=2)
        walks.append(Walk(name, tiles, sizes))
    return walks


def _most_rows(dim: int, dtype: jnp.dtype) -> int:
    """Rows of a program: their products and results are in registers."""
    rows = 128 if dim <= 128 else 64
    return rows if dtype.itemsize == 2 else rows // 4


def _most_keys(dim: int, dtype: jnp.dtype, page_dtype: jnp.dtype) -> int:
    """Keys of a KV tile: every warp has all of them in its registers, 8-bit floats as they are converted."""
    if dim > 128 and page_dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        return 16
    return 32 if dim > 128 or dtype.itemsize > 2 else 64

"""Attention of a step's tokens in plain XLA: its walks over query tiles of one size.

Flow:    queries, cache, lengths of the step -> [attend_step] -> query tiles -> attend_tiles -> (out, lse) by token

Two walks share a step: over the sequences of few queries, each one query tile, all at once; and over query tiles of
the others, so many at a time as their states may take memory. Loops end where the step's tiles and pages do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.backends import XlaPath
from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule
from pallas_kernels.paged_tiles import column_tokens
from pallas_kernels.schedule import Batch, QueryTile, few_queries, query_tiles
from pallas_kernels.varying import vary_like
from pallas_kernels.xla.tiles import Limits, PageReader, Sizes, TileQueries, attend_tiles

_TILE_ROWS = 512  # queries times heads of a KV head
Results = tuple[jax.Array, jax.Array]  # out [T, Hkv, G, Dv], lse float32[T, Hkv, G]


def path_over(block_tables: jax.Array, pages: tuple[jax.Array, ...], name: str = "KV") -> XlaPath:
    """What a call costs: K and V are read, written, and read by the products; logits are the rest."""
    page_bytes = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in pages)
    return XlaPath(4, block_tables.size * page_bytes, f"the {name} that its tables name")


def product_dtype(q_dtype: jnp.dtype, page_dtype: jnp.dtype) -> jnp.dtype:
    """In which queries and pages are multiplied: it holds the numbers of both."""
    if jnp.dtype(page_dtype).itemsize > 1 and q_dtype != page_dtype:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(q_dtype)


class Step(NamedTuple):
    """What the walks of a step share."""

    queries: TileQueries
    cache: PageReader
    mask: MaskRule
    sinks: jax.Array | None  # [Hq]
    v_scale: jax.Array  # float32[Hkv]
    dtype: jnp.dtype  # of the results
    limits: Limits

    def sinks_of_rows(self, num_queries: int) -> jax.Array | None:
        """float32[Hkv, num_queries * G], rows as those of a query tile."""
        if self.sinks is None:
            return None
        by_head = self.sinks.astype(jnp.float32).reshape(self.queries.q.shape[1], -1)
        return jnp.tile(by_head, (1, num_queries))


class Walk(NamedTuple):
    """Query tiles of one size, in chunks of `sizes.num_tiles`."""

    name: str
    tiles: QueryTile  # int32[whole chunks] each
    num_tiles: jax.Array  # int32[] that there are; the others have no queries
    sizes: Sizes


def plan_walks(step: Step, batch: Batch) -> list[Walk]:
    """The walks of a step: over sequences of few queries, and over query tiles of the others if it can have any."""
    num_tokens, _, group, _ = step.queries.q.shape
    page_size, num_seqs = column_tokens(step.cache), batch.seq_lens.shape[0]
    most = min(num_tokens, max(1, _TILE_ROWS // group))
    few = few_queries(num_tokens, num_seqs, most)
    is_short = batch.q_lens <= few
    parts = [("short", few, is_short, num_seqs)]
    if num_tokens > few:
        parts.append(("long", most, ~is_short, min(num_tokens, num_tokens // most + num_seqs)))
    walks = []
    for name, size, is_own, room in parts:
        own = batch._replace(q_lens=jnp.where(is_own, batch.q_lens, 0))
        sizes = Sizes.of(step.queries, size, step.cache, step.mask, room, step.limits)
        room = cdiv(room, sizes.num_tiles) * sizes.num_tiles
        tiles, count = query_tiles(own, step.mask, room=room, queries=size, page_size=page_size)
        walks.append(Walk(name, tiles, count, sizes))
    return walks


def attend_step(step: Step, batch: Batch) -> Results:
    """Attention of all tokens over all keys that each sees; 0 and -inf for those that see none."""
    rows = step.queries.q.shape[:3]
    results = (jnp.zeros((*rows, step.cache.head_dim_v), step.dtype), jnp.full(rows, -jnp.inf))
    results = vary_like(results, step.queries.q, *batch, *step.cache.pages, step.cache.block_tables)
    for walk in plan_walks(step, batch):
        with jax.named_scope(walk.name):
            results = _attend_walk(results, step, walk)
    return results


def _attend_walk(results: Results, step: Step, walk: Walk) -> Results:
    """`results` with those of the walk's tokens."""
    size = walk.sizes.num_tiles

    def chunk(i: jax.Array, results: Results) -> Results:
        own = QueryTile(*(lax.dynamic_slice_in_dim(x, i * size, size) for x in walk.tiles))
        return _attend_chunk(results, step, own, walk.sizes)

    if walk.tiles.seq.shape[0] == size:
        return _attend_chunk(results, step, walk.tiles, walk.sizes)
    with jax.named_scope("chunks"):
        return lax.fori_loop(0, -(-walk.num_tiles // size), chunk, results)


def _attend_chunk(results: Results, step: Step, tiles: QueryTile, sizes: Sizes) -> Results:
    """`results` with those of the tiles' tokens."""
    num_tokens, num_kv_heads, group, _ = step.queries.q.shape
    state = attend_tiles(step.queries, step.cache, step.mask, tiles, sizes)
    out, lse = online_softmax.finish(state, step.sinks_of_rows(sizes.queries))
    out = out * step.v_scale[:, None, None]
    place = jnp.arange(sizes.queries, dtype=jnp.int32)
    is_real = tiles.first_pos[:, None] + place <= tiles.last_pos[:, None]
    token = jnp.where(is_real, tiles.token[:, None] + place, num_tokens)

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(sizes.num_tiles, num_kv_heads, sizes.queries, group, *new.shape[3:]).swapaxes(1, 2)
        return old.at[token].set(new.astype(old.dtype), mode="drop")

    return written(results[0], out), written(results[1], lse)


def per_head(scale: jax.Array | None, num_kv_heads: int) -> jax.Array:
    """A scale [] or [num_kv_heads] as float32[num_kv_heads]."""
    return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (num_kv_heads,))

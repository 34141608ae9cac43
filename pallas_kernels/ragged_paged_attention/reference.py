"""ragged_paged_attention in plain jnp: the specification, and the fast path on CPU.

Flow:    api -> [reference] -> (out, lse)

One dynamic loop over the work items (query tile, KV tile) that the step really has, so that cost follows the tokens
seen and not the buckets T, S, P. It runs twice, with two shapes of tiles:

    one-token rows    1 query  x 128 keys
    longer rows       about 128 rows (queries times query heads of a KV head) x 128 keys

A KV tile is a few pages of the mask's page run; an item merges its part into the state of its query tokens. No mask
or score ever exceeds one tile of queries by one tile of keys. A non-finite key or value can reach only queries of its
own sequence that share a query tile with one that sees it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import cdiv
from pallas_kernels.ragged_paged_attention import online_softmax
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.online_softmax import SoftmaxState
from pallas_kernels.ragged_paged_attention.paged_tiles import PagedTiles
from pallas_kernels.ragged_paged_attention.schedule import Batch, QueryTile, Schedule, make_schedule
from pallas_kernels.varying import vary_like

_TILE_KEYS = 128
_TILE_ROWS = 128


@dataclass(frozen=True)
class _Layer:
    """What the loop reads. Rows are `token * group + query head within its KV head`."""

    q: jax.Array  # float32[Hkv, rows of all tokens and of one more tile, D], scaled
    cache: PagedTiles
    mask: MaskRule
    group: int  # query heads per KV head
    soft_cap: float | None


@functools.partial(jax.jit, static_argnames=("mask", "num_kv_heads", "sm_scale", "soft_cap"))
def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    mask: MaskRule,
    num_kv_heads: int,
    sm_scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dv] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // num_kv_heads
    queries = min(num_tokens, max(8, _TILE_ROWS // group))  # of the largest tile
    cache = PagedTiles(pages, block_tables, num_kv_heads, head_dim)
    tile_pages = (_tile_pages(cache, mask, 1), _tile_pages(cache, mask, queries))
    real = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < distribution[2]
    schedule = make_schedule(
        Batch(seq_lens, query_start_loc[:-1], jnp.where(real, jnp.diff(query_start_loc), 0)),
        mask,
        num_tokens=num_tokens,
        queries=queries,
        tile_pages=tile_pages,
        page_size=cache.page_size,
    )
    scaled = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, group, head_dim) * sm_scale * _per_head(k_scale)
    padded = jnp.pad(scaled.swapaxes(0, 1), [(0, 0), (0, queries), (0, 0), (0, 0)])
    layer = _Layer(padded.reshape(num_kv_heads, -1, head_dim), cache, mask, group, soft_cap)
    state = online_softmax.empty(layer.q.shape[:2], cache.head_dim_v)
    state = vary_like(state, layer.q, *schedule, *pages, block_tables)
    state = _attend(layer, schedule, 0, state, queries=1, tile_pages=tile_pages[0])
    if num_tokens > 1:
        state = _attend(layer, schedule, 1, state, queries=queries, tile_pages=tile_pages[1])
    state = jax.tree.map(lambda x: _by_token(x, num_tokens, group), state)
    per_row = None if sinks is None else sinks.astype(jnp.float32).reshape(1, num_kv_heads, group)
    out, lse = online_softmax.finish(state, per_row)
    out = out * _per_head(v_scale)
    return out.reshape(num_tokens, num_q_heads, -1).astype(q.dtype), lse.reshape(num_tokens, num_q_heads)


def _tile_pages(cache: PagedTiles, mask: MaskRule, queries: int) -> int:
    """Pages of a KV tile: about `_TILE_KEYS` keys, shared out evenly over the most pages that a query tile sees."""
    most = mask.max_pages(queries, cache.block_tables.shape[1], cache.page_size)
    return cdiv(most, cdiv(most, max(1, _TILE_KEYS // cache.page_size)))


def _per_head(scale: jax.Array | None) -> jax.Array:
    """A scale [] or [num_kv_heads] as float32[1, 1 or num_kv_heads, 1, 1]."""
    return jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(1, -1, 1, 1)


def _by_token(x: jax.Array, num_tokens: int, group: int) -> jax.Array:
    """[Hkv, rows, ...] as [T, Hkv, G, ...]."""
    return x.reshape(x.shape[0], -1, group, *x.shape[2:])[:, :num_tokens].swapaxes(0, 1)


def _attend(
    layer: _Layer, schedule: Schedule, part: int, state: SoftmaxState, *, queries: int, tile_pages: int
) -> SoftmaxState:
    """`state` after all work items of one part: tiles of at most `queries` tokens by `tile_pages` pages."""

    def trip(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
        tile, kv_tile = schedule.item(part, i)
        start, rows = tile.token * layer.group, queries * layer.group
        q, *old = (lax.dynamic_slice_in_dim(x, start, rows, axis=1) for x in (layer.q, *state))
        k, v, visible = _read(layer, tile, kv_tile * tile_pages, queries, tile_pages)
        new = online_softmax.attend(SoftmaxState(*old), q, k, v, visible, layer.soft_cap)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, axis=1), state, new)

    return lax.fori_loop(0, schedule.num_items(part), trip, state)


def _read(
    layer: _Layer, tile: QueryTile, first_page: jax.Array, queries: int, tile_pages: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K and V of some pages of a query tile's run, V zero where no query sees it, and bool[1, rows, keys] who sees."""
    mask = layer.mask
    kv = layer.cache.read(tile.seq, tile.run, first_page, tile_pages)
    seen = mask.visible(kv.key_pos, tile.first_pos, tile.last_pos, tile.seq_len)
    pos = tile.first_pos + lax.broadcasted_iota(jnp.int32, (queries * layer.group, 1), 0) // layer.group
    visible = mask.visible(kv.key_pos[None], pos, pos, tile.seq_len) & (pos >= 0) & (pos <= tile.last_pos)
    return kv.k, jnp.where(seen[None, :, None], kv.v, 0.0), visible[None]

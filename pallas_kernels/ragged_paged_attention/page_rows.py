"""Sequences of few queries, page by page: keys and values are read where they lie in their pages.

Flow:    q of short sequences + TileWalk -> [attend_pages_in_place] -> out, lse

A gathered tile of K and V is read from memory, written and read again. Here one elementwise pass reads K and multiplies
it with the query. Another reads V and sums the weighted values of a page, whose slots are terms of one expression. XLA
for CPU compiles both to loops over vectors that load from the pages themselves. Work items are single pages, many at a
time, so that only pages that are seen cost anything.

The passes are made once for each query row of a KV head, so this is for one row or two: the second finds the page in
the cache. Barriers keep XLA from merging the passes with others, which would no longer run over vectors.
"""

from __future__ import annotations

from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.paged_tiles import PagedTiles, locate
from pallas_kernels.ragged_paged_attention.tile_walk import TileReader, TileWalk
from pallas_kernels.varying import vary_like

MOST_ROWS = 2  # query rows of a KV head
_MOST_SLOTS = 32  # of a page: each is a term of the expression that sums values
_TRIP_BYTES = 2**19  # of K times q at a time: it stays in a core's cache
_CLIP = "promise_in_bounds"


def reads_in_place(cache: TileReader, num_rows: int) -> TypeGuard[PagedTiles]:
    """Whether `attend_pages_in_place` is for pages like these and `num_rows` query rows of a KV head."""
    return isinstance(cache, PagedTiles) and num_rows <= MOST_ROWS and cache.page_size <= _MOST_SLOTS


def attend_pages_in_place(
    q: jax.Array,  # float32[S, few, Hkv, G, D]
    cache: PagedTiles,
    walk: TileWalk,  # over `cache`, its tiles of part 0 single pages
    soft_cap: float | None,
    sinks: jax.Array | None,  # float32[Hkv, G]
) -> tuple[jax.Array, jax.Array]:
    """(out float32[S, few, Hkv, G, Dv], lse float32[S, few, Hkv, G]); 0 and -inf where part 0 has no query."""
    num_seqs, few, num_kv_heads, group, head_dim = q.shape
    schedule, num_rows = walk.schedule, few * group
    item_bytes = num_rows * cache.page_size * num_kv_heads * head_dim * 4
    num_items = min(walk.most_items, max(1, _TRIP_BYTES // item_bytes))
    rows = q.swapaxes(2, 3).reshape(num_seqs, num_rows, -1)

    def trip(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
        return _attend_items(state, rows, cache, walk, i * num_items + jnp.arange(num_items, dtype=jnp.int32), soft_cap)

    state = online_softmax.empty((num_seqs, num_rows, num_kv_heads), cache.head_dim_v)
    state = vary_like(state, q, *schedule, *cache.pages, cache.block_tables)
    state = lax.fori_loop(0, -(-schedule.num_items(0) // num_items), trip, state)
    per_row = None if sinks is None else jnp.tile(sinks.T, (few, 1))
    out, lse = online_softmax.finish(state, per_row)
    shape = (num_seqs, few, group, num_kv_heads)
    return out.reshape(*shape, -1).swapaxes(2, 3), lse.reshape(shape).swapaxes(2, 3)


def _attend_items(
    state: SoftmaxState,  # of [S, rows, Hkv]
    q: jax.Array,  # float32[S, rows, Hkv * D]
    cache: PagedTiles,
    walk: TileWalk,
    items: jax.Array,  # int32[n]
    soft_cap: float | None,
) -> SoftmaxState:
    """`state` after work items of part 0, a page each."""
    num_rows, num_kv_heads = state.m.shape[1:]
    seq, ids, seen, visible = _pages_of(walk, items)
    seen, visible = (jnp.repeat(x, num_rows // x.shape[1], axis=1) for x in (seen[:, None], visible))
    known = jnp.minimum(seq, q.shape[0] - 1)
    # An item and row after the other, as if each row had a page of its own.
    ids, known, seen = lax.optimization_barrier((jnp.repeat(ids, num_rows), known, seen.reshape(-1, seen.shape[-1])))
    s = _scores(q.at[known].get(mode=_CLIP).reshape(ids.size, 1, -1), cache, ids)
    s = s.reshape(*visible.shape, num_kv_heads)  # [n, rows, slots, Hkv]
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible[..., None], s, -jnp.inf)
    m = state.m.at[seq].max(jnp.max(s, axis=2), mode="drop")
    s = s - online_softmax.finite(m).at[known].get(mode=_CLIP)[:, :, None]
    p = lax.optimization_barrier(jnp.exp(lax.optimization_barrier(s.reshape(-1)))).reshape(s.shape)
    shrink = jnp.exp(state.m - online_softmax.finite(m))
    part = jnp.sum(p, axis=2)
    values = _weighted_values(p.reshape(ids.size, -1, num_kv_heads), cache, ids, seen)
    values = values.reshape(*part.shape, -1)
    values = jnp.where(part[..., None] == 0, 0.0, values)  # 0 * NaN
    weight = (state.weight * shrink).at[seq].add(part, mode="drop")
    total = (state.total * shrink[..., None]).at[seq].add(values, mode="drop")
    return SoftmaxState(m, weight, total)


def _pages_of(walk: TileWalk, items: jax.Array) -> tuple[jax.Array, ...]:
    """(sequence int32[n], page int32[n], seen bool[n, slots], visible bool[n, few, slots]) of work items.

    A slot is seen if any query of its sequence sees it. Beyond the last item: a sequence that is not there.
    """
    tiles, number = walk.schedule.item(0, items)
    cache, mask = walk.cache, walk.mask

    def one(seq, run, first):  # type: ignore[no-untyped-def]
        return locate(cache, seq, run, first, 1)

    ids, key_pos = jax.vmap(one)(tiles.seq, tiles.run, number)
    return tiles.seq, ids[:, 0], tiles.reaches(mask, key_pos), tiles.sees(mask, key_pos, walk.sizes[0])


def _scores(
    q: jax.Array,  # float32[n, 1, Hkv * D]
    cache: PagedTiles,
    ids: jax.Array,  # int32[n]
) -> jax.Array:  # float32[n * slots * Hkv]
    """Products of each row with all keys of its page: one pass over K, then a sum over dimensions."""
    products = lax.optimization_barrier(cache.keys(ids) * q)
    ones = jnp.ones(cache.head_dim, jnp.float32)
    return jnp.matmul(products.reshape(-1, cache.head_dim), ones, precision=lax.Precision.HIGHEST)


def _weighted_values(
    p: jax.Array,  # float32[n, slots, Hkv]
    cache: PagedTiles,
    ids: jax.Array,  # int32[n]
    seen: jax.Array,  # bool[n, slots]
) -> jax.Array:  # float32[n, Hkv, Dv]
    """For each row the values of its page times their weights, those that no query sees left out: one pass over V."""
    total = jnp.zeros((), jnp.float32)
    for slot in range(cache.page_size):
        values = jnp.where(seen[:, slot, None, None], cache.values(ids, slot), 0.0)
        total = total + p[:, slot, :, None] * values
    return lax.optimization_barrier(total)

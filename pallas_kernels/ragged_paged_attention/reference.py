"""ragged_paged_attention in plain jnp: the specification, and the fast path on CPU.

Flow:    api -> [reference] -> (out, lse)

Two loops over the work that the step really has (`tile_walk`). Sequences of few queries go many work items at a time:
one gather of their pages and one batched product for all of them, whose parts are then merged into the softmax states
of their sequences; or, with one row for each KV head, without a gather (`page_rows`). The queries of other
sequences go in tiles of about 128 rows (queries times query heads of a KV head), each with the KV tiles that it sees.

Few rows of few heads are multiplied with the keys of all KV heads at once, each row zero where another head's numbers
stand: K and V then are read as they lie in their pages, where a product for each head would first copy its part. A
non-finite key of one head can then reach the other heads of its query.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.key_share import KeyShare
from pallas_kernels.mask import MaskRule
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.paged_tiles import PagedTiles
from pallas_kernels.ragged_paged_attention.page_rows import attend_pages_in_place, reads_in_place
from pallas_kernels.ragged_paged_attention.tile_walk import TileReader, TileWalk
from pallas_kernels.schedule import Batch, few_queries
from pallas_kernels.varying import vary_like

_TILE_ROWS = 128
_TRIP_BYTES = 5 * 2**16  # of gathered K at a time: with V it stays in a core's cache
_MOST_MERGED_ROWS = 16  # query rows of all heads up to which they share one product


@functools.partial(jax.jit, static_argnames=("mask", "num_kv_heads", "sm_scale", "soft_cap", "is_decode"))
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
    share: KeyShare | None = None,
    sink_tokens: jax.Array | None = None,  # int32[S] where the mask has them by sequence
    is_decode: bool = False,  # token i is the query of sequence i
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dv] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    cache = PagedTiles(pages, block_tables, num_kv_heads, q.shape[-1], share)
    batch = Batch.of_step(seq_lens, query_start_loc, distribution, sink_tokens)
    heads = by_kv_head(q, num_kv_heads) * sm_scale * _per_head(k_scale)
    out, lse = attend_pages(heads, cache, mask, batch, soft_cap=soft_cap, sinks=sinks, is_decode=is_decode)
    out = out * _per_head(v_scale)
    return out.reshape(*q.shape[:2], -1).astype(q.dtype), lse.reshape(q.shape[:2])


def by_kv_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[T, Hq, D] as float32[T, Hkv, Hq // Hkv, D]."""
    return q.astype(jnp.float32).reshape(q.shape[0], num_kv_heads, -1, q.shape[-1])


def attend_pages(
    q: jax.Array,  # float32[T, Hkv, G, D], scaled
    cache: TileReader,
    mask: MaskRule,
    batch: Batch,
    *,
    soft_cap: float | None,
    sinks: jax.Array | None,  # [Hq]
    is_decode: bool,
) -> tuple[jax.Array, jax.Array]:
    """(out float32[T, Hkv, G, Dv], lse float32[T, Hkv, G]) over all keys of `cache` that each query sees."""
    num_tokens, num_kv_heads, group, _ = q.shape
    queries = min(num_tokens, max(8, _TILE_ROWS // group))
    few = few_queries(num_tokens, batch.seq_lens.shape[0], queries)
    by_page = reads_in_place(cache, few * group)
    walk = TileWalk.of_step(cache, mask, batch, num_tokens=num_tokens, sizes=(few, queries), by_page=by_page)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group)

    def attend_few(few_q: jax.Array) -> tuple[jax.Array, jax.Array]:
        if reads_in_place(cache, few * group):
            return attend_pages_in_place(few_q, cache, walk, soft_cap, sinks)
        return _attend_short(few_q, walk, soft_cap, sinks)

    if is_decode:
        out, lse = attend_few(q[:, None])
        return out[:, 0], lse[:, 0]
    if num_tokens > few:
        out, lse = _attend_long(q, walk, soft_cap, sinks)
    else:
        out, lse = jnp.zeros((*q.shape[:3], cache.head_dim_v)), jnp.full(q.shape[:3], -jnp.inf)
    i = jnp.arange(few, dtype=jnp.int32)
    is_short = (batch.q_lens <= few)[:, None] & (i < batch.q_lens[:, None])
    tokens = jnp.where(is_short, batch.starts[:, None] + i, num_tokens)  # [S, few], beyond all where there is none
    short_out, short_lse = attend_few(q.at[tokens].get(mode="fill", fill_value=0.0))
    return out.at[tokens].set(short_out, mode="drop"), lse.at[tokens].set(short_lse, mode="drop")


def _attend_short(
    q: jax.Array,  # float32[S, few, Hkv, G, D]
    walk: TileWalk,
    soft_cap: float | None,
    sinks: jax.Array | None,  # float32[Hkv, G]
) -> tuple[jax.Array, jax.Array]:
    """(out float32[S, few, Hkv, G, Dv], lse float32[S, few, Hkv, G]); 0 and -inf where part 0 has no query."""
    num_seqs, few, num_kv_heads, group, head_dim = q.shape
    cache, schedule = walk.cache, walk.schedule
    item_bytes = walk.tile_pages[0] * cache.page_size * num_kv_heads * head_dim * 4
    num_items = min(walk.most_items, max(1, _TRIP_BYTES // item_bytes))
    merged = num_kv_heads if few * num_kv_heads * group <= _MOST_MERGED_ROWS else 1
    rows = _merged_queries(q.swapaxes(1, 2), merged)

    def trip(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
        tiles, kv_tiles = schedule.item(0, i * num_items + jnp.arange(num_items, dtype=jnp.int32))
        kv, visible = jax.vmap(functools.partial(walk.read, 0))(tiles, kv_tiles)
        k, v = (_merged_heads(x, merged) for x in kv[:2])
        given = rows.at[tiles.seq].get(mode="fill", fill_value=0.0)
        empty = online_softmax.empty(given.shape[:-1], v.shape[-1])
        seen = jnp.repeat(jnp.repeat(visible, group, axis=1)[:, None], merged, axis=1)  # [n, heads, few * G, keys]
        seen = seen.reshape(seen.shape[0], 1, -1, seen.shape[-1])
        part = online_softmax.attend(empty, given, k, v, seen, soft_cap)
        return online_softmax.merge_rows(state, tiles.seq, _separated(part, merged))

    state = online_softmax.empty((num_seqs, num_kv_heads, few * group), cache.head_dim_v)
    state = vary_like(state, q, *schedule, *cache.pages, cache.block_tables)
    state = lax.fori_loop(0, -(-schedule.num_items(0) // num_items), trip, state)
    per_row = None if sinks is None else jnp.tile(sinks, (1, few))
    out, lse = online_softmax.finish(state, per_row)
    shape = (num_seqs, num_kv_heads, few, group)
    return out.reshape(*shape, -1).swapaxes(1, 2), lse.reshape(shape).swapaxes(1, 2)


def _merged_queries(q: jax.Array, merged: int) -> jax.Array:  # [S, Hkv, few, G, D]
    """[S, Hkv // merged, merged * few * G, merged * D]: zero where the numbers of another head stand."""
    num_seqs, _, few, group, head_dim = q.shape
    q = q.reshape(num_seqs, -1, merged, few * group, 1, head_dim)
    own = jnp.eye(merged, dtype=bool)[:, None, :, None]
    return jnp.where(own, q, 0.0).reshape(num_seqs, -1, merged * few * group, merged * head_dim)


def _merged_heads(x: jax.Array, merged: int) -> jax.Array:  # [n, slots, Hkv, D]
    """[n, Hkv // merged, slots, merged * D]."""
    return x.reshape(*x.shape[:2], x.shape[2] // merged, -1).swapaxes(1, 2)


def _separated(part: SoftmaxState, merged: int) -> SoftmaxState:  # of [n, Hkv // merged, merged * rows]
    """The state of [n, Hkv, rows], with each head's own part of the values."""
    n, pairs, _ = part.m.shape
    m, weight = (x.reshape(n, pairs * merged, -1) for x in part[:2])
    total = part.total.reshape(n, pairs, merged, m.shape[-1], merged, -1)
    total = jnp.stack([total[:, :, head, :, head] for head in range(merged)], axis=2)
    return SoftmaxState(m, weight, total.reshape(*m.shape, -1))


def _attend_long(
    q: jax.Array,  # float32[T, Hkv, G, D]
    walk: TileWalk,
    soft_cap: float | None,
    sinks: jax.Array | None,  # float32[Hkv, G]
) -> tuple[jax.Array, jax.Array]:
    """(out float32[T, Hkv, G, Dv], lse float32[T, Hkv, G]); 0 and -inf where part 1 has no query."""
    num_tokens, num_kv_heads, group, _ = q.shape
    cache, schedule, size = walk.cache, walk.schedule, walk.sizes[1]
    q = jnp.pad(q, [(0, size), (0, 0), (0, 0), (0, 0)])  # a whole tile may start at the last token
    per_row = None if sinks is None else jnp.tile(sinks, (1, size))
    sources = (q, *schedule, *cache.pages, cache.block_tables)

    def trip(n: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, num_kv_tiles = schedule.tile(1, n)
        given = lax.dynamic_slice_in_dim(q, tile.token, size).swapaxes(0, 1)  # [Hkv, size, G, D]
        rows = given.reshape(num_kv_heads, size * group, -1)

        def attend(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
            kv, visible = walk.read(1, tile, i)
            k, v = kv.k.swapaxes(0, 1), kv.v.swapaxes(0, 1)
            return online_softmax.attend(state, rows, k, v, jnp.repeat(visible, group, axis=0)[None], soft_cap)

        state = vary_like(online_softmax.empty(rows.shape[:2], cache.head_dim_v), *sources)
        new = online_softmax.finish(lax.fori_loop(0, num_kv_tiles, attend, state), per_row)
        # What stands beyond the tile's end is 0 and -inf, until the tile that it belongs to is written, later.
        by_token = [x.reshape(num_kv_heads, size, group, *x.shape[2:]).swapaxes(0, 1) for x in new]
        out, lse = (
            lax.dynamic_update_slice_in_dim(old, x, tile.token, 0) for old, x in zip(results, by_token, strict=True)
        )
        return out, lse

    rows = (num_tokens + size, num_kv_heads, group)
    results = vary_like((jnp.zeros((*rows, cache.head_dim_v)), jnp.full(rows, -jnp.inf)), *sources)
    out, lse = lax.fori_loop(0, schedule.num_tiles(1), trip, results)
    return out[:num_tokens], lse[:num_tokens]


def _per_head(scale: jax.Array | None) -> jax.Array:
    """A scale [] or [num_kv_heads] as float32[1 or num_kv_heads, 1, 1]."""
    return jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(-1, 1, 1)

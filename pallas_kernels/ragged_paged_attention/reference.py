"""ragged_paged_attention in plain jnp: the specification, and the fast path on CPU.

Flow:    api -> [reference] -> (out, lse)

Two dynamic loops, each over a work list that holds what is really attended, so that cost follows the tokens seen and
not the buckets T, S, P:

    one-token rows    items (sequence, KV tile), `_ITEMS` of them per trip, merged into their sequences
    longer rows       items (sequence, query tile); per item a loop over the KV tiles that this query tile sees

A KV tile is a few pages of the mask's page run. No mask or score ever exceeds one tile of queries by one tile of keys.
A non-finite key or value can reach only queries of its own sequence that share a query tile with one that sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import cdiv
from pallas_kernels.ragged_paged_attention import online_softmax
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.online_softmax import SoftmaxState
from pallas_kernels.ragged_paged_attention.paged_tiles import PagedTiles
from pallas_kernels.varying import vary_like

_ITEMS = 8  # KV tiles per trip of the one-token loop
_DECODE_KEYS = 128  # keys of a KV tile there
_PREFILL_KEYS = 256  # keys of a KV tile for longer rows
_PREFILL_ROWS = 128  # rows (queries times query heads of a KV head) of a query tile


class Batch(NamedTuple):
    """Rows of the step, without their tables."""

    seq_lens: jax.Array  # int32[S]
    starts: jax.Array  # int32[S] first query token
    q_lens: jax.Array  # int32[S] 0 for padding rows


@dataclass(frozen=True)
class Problem:
    """One call: queries ordered by KV head, and everything that does not change from tile to tile."""

    q: jax.Array  # float32[T, num_kv_heads, group, head_dim], times sm_scale and k_scale
    sinks: jax.Array  # float32[num_kv_heads, group], -inf: none
    batch: Batch
    tiles: PagedTiles
    mask: MaskRule
    soft_cap: float | None

    @property
    def sources(self) -> tuple[jax.Array, ...]:
        """Arrays that decide over which mesh axes results vary."""
        return (self.q, self.sinks, *self.batch, *self.tiles.pages, self.tiles.block_tables)


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
    scale = jnp.float32(sm_scale) * _per_head(k_scale)
    no_sinks = jnp.full((num_q_heads,), -jnp.inf, jnp.float32)
    real_row = jnp.arange(seq_lens.shape[0]) < distribution[2]
    problem = Problem(
        q=q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, group, head_dim) * scale[None],
        sinks=(no_sinks if sinks is None else sinks.astype(jnp.float32)).reshape(num_kv_heads, group),
        batch=Batch(seq_lens, query_start_loc[:-1], jnp.where(real_row, jnp.diff(query_start_loc), 0)),
        tiles=PagedTiles(pages, block_tables, num_kv_heads, head_dim, tile_pages=1),
        mask=mask,
        soft_cap=soft_cap,
    )
    out, lse = _longer_rows(problem, *_one_token_rows(problem))
    out = (out * _per_head(v_scale)[None]).reshape(num_tokens, num_q_heads, -1)
    return out.astype(q.dtype), lse.reshape(num_tokens, num_q_heads)


def _per_head(scale: jax.Array | None) -> jax.Array:
    """A scale [] or [num_kv_heads] as float32[1 or num_kv_heads, 1, 1]."""
    return jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(-1, 1, 1)


def _with_tiles(problem: Problem, num_queries: int, keys: int) -> PagedTiles:
    """Tiles of about `keys` keys, shared out evenly over the most pages that `num_queries` queries can see."""
    tiles = problem.tiles
    most = problem.mask.max_pages(num_queries, tiles.block_tables.shape[1], tiles.page_size)
    tile_pages = cdiv(most, cdiv(most, max(1, keys // tiles.page_size)))
    return PagedTiles(tiles.pages, tiles.block_tables, tiles.num_kv_heads, tiles.head_dim, tile_pages)


def _work_list(counts: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sequence, index within it) of work item `item`, when sequence s has `counts[s]` items.

    Items beyond the last belong to the last sequence, with an index of at least its count.
    """
    ends = jnp.cumsum(counts)
    passed = jnp.expand_dims(item, -1) >= jnp.expand_dims(ends, range(item.ndim))
    seq = jnp.minimum(jnp.sum(passed, axis=-1, dtype=jnp.int32), counts.shape[0] - 1)
    return seq, item - (ends - counts)[seq]


def _one_token_rows(problem: Problem) -> tuple[jax.Array, jax.Array]:
    """(out float32[T, Hkv, G, Dv], lse float32[T, Hkv, G]) of the rows with one query token; 0 and -inf elsewhere."""
    batch, mask = problem.batch, problem.mask
    tiles = _with_tiles(problem, 1, _DECODE_KEYS)
    num_tokens = problem.q.shape[0]
    num_rows = batch.seq_lens.shape[0]
    one = (batch.q_lens == 1) & (batch.seq_lens > 0)
    pos = jnp.where(one, batch.seq_lens - 1, -1)
    run = mask.page_run(pos, pos, batch.seq_lens, tiles.page_size)
    counts = -(-run.num_pages // tiles.tile_pages)
    q = problem.q[batch.starts]
    items = min(_ITEMS, num_rows * cdiv(tiles.block_tables.shape[1], tiles.tile_pages))

    def trip(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
        seq, tile_id = _work_list(counts, i * items + jnp.arange(items, dtype=jnp.int32))
        tile = tiles.read(seq, type(run)(*(x[seq] for x in run)), tile_id * tiles.tile_pages)
        p = pos[seq][:, None]
        visible = mask.visible(tile.key_pos, p, p, batch.seq_lens[seq][:, None])
        v = jnp.where(visible[:, None, :, None], tile.v, 0.0)
        part = online_softmax.attend(q[seq], tile.k, v, visible[:, None, None], problem.soft_cap)
        return _merge_items(state, part, seq[None] == jnp.arange(num_rows, dtype=jnp.int32)[:, None])

    state = online_softmax.start(jnp.broadcast_to(problem.sinks[None], q.shape[:-1]), tiles.head_dim_v)
    num_trips = -(-jnp.sum(counts) // items)
    out, lse = online_softmax.finish(lax.fori_loop(0, num_trips, trip, vary_like(state, *problem.sources)))
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.sum(batch.starts[None, 1:] <= token[:, None], axis=-1)
    mine = one[seq] & (batch.starts[seq] == token)
    return (
        jnp.where(mine[:, None, None, None], out[seq], 0.0),
        jnp.where(mine[:, None, None], lse[seq], -jnp.inf),
    )


def _merge_items(state: SoftmaxState, part: SoftmaxState, owner: jax.Array) -> SoftmaxState:
    """State [S, ...] with the parts [items, ...] merged in; `owner` bool[S, items] says whose they are.

    Sums are taken under the mask and not as a product with 0 and 1: a NaN stays in its own sequence.
    """
    owner = owner[:, :, None, None]
    m = jnp.max(jnp.where(owner, part.m[None], -jnp.inf), axis=1)
    weight = jnp.where(owner, jnp.exp(part.m[None] - jnp.where(m == -jnp.inf, 0.0, m)[:, None]), 0.0)
    total = jnp.sum(jnp.where(owner, part.l[None] * weight, 0.0), axis=1)
    acc = jnp.sum(jnp.where(owner[..., None], part.acc[None] * weight[..., None], 0.0), axis=1)
    return online_softmax.merge(state, SoftmaxState(m, total, acc))


def _longer_rows(problem: Problem, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`out` and `lse` with the rows of two and more query tokens filled in."""
    batch = problem.batch
    num_tokens, num_kv_heads, group, _ = problem.q.shape
    rows = min(num_tokens, max(8, _PREFILL_ROWS // group))  # queries of a tile
    tiles = _with_tiles(problem, rows, _PREFILL_KEYS)
    counts = jnp.where(batch.q_lens > 1, -(-batch.q_lens // rows), 0)
    q = jnp.pad(problem.q, [(0, rows), (0, 0), (0, 0), (0, 0)]).swapaxes(0, 1)
    sinks = jnp.broadcast_to(problem.sinks[:, None], (num_kv_heads, rows, group)).reshape(num_kv_heads, -1)

    def query_tile(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seq, tile_id = _work_list(counts, i)
        first = tile_id * rows
        token = batch.starts[seq] + first
        tile_q = lax.dynamic_slice_in_dim(q, token, rows, axis=1).reshape(num_kv_heads, rows * group, -1)
        index = first + jnp.arange(rows, dtype=jnp.int32)
        pos = batch.seq_lens[seq] - batch.q_lens[seq] + index
        pos = jnp.where(index < batch.q_lens[seq], pos, -1)
        state = online_softmax.start(sinks, tiles.head_dim_v)
        state = _one_query_tile(problem, tiles, tile_q, seq, pos, vary_like(state, *problem.sources))
        shape = (num_kv_heads, rows, group)
        tile_out, tile_lse = online_softmax.finish(state)
        new = (tile_out.reshape(*shape, -1).swapaxes(0, 1), tile_lse.reshape(shape).swapaxes(0, 1))
        return _put(results[0], new[0], token, pos >= 0), _put(results[1], new[1], token, pos >= 0)

    padding = [(0, rows), (0, 0), (0, 0)]
    results = (jnp.pad(out, [*padding, (0, 0)]), jnp.pad(lse, padding))
    results = lax.fori_loop(0, jnp.sum(counts), query_tile, vary_like(results, *problem.sources))
    return results[0][:num_tokens], results[1][:num_tokens]


def _one_query_tile(
    problem: Problem,
    tiles: PagedTiles,
    q: jax.Array,  # float32[Hkv, rows * G, D]
    seq: jax.Array,  # int32[]
    pos: jax.Array,  # int32[rows], -1: no query
    state: SoftmaxState,
) -> SoftmaxState:
    """`state` after all keys that the queries of one tile see."""
    mask = problem.mask
    group = problem.q.shape[2]
    seq_len = problem.batch.seq_lens[seq]
    last = jnp.max(pos)
    first = jnp.maximum(jnp.min(jnp.where(pos < 0, last, pos)), 0)
    run = mask.page_run(first, last, seq_len, tiles.page_size)

    def trip(i: jax.Array, state: SoftmaxState) -> SoftmaxState:
        tile = tiles.read(seq[None], type(run)(*(x[None] for x in run)), i[None] * tiles.tile_pages)
        key_pos = tile.key_pos[0]
        seen = mask.visible(key_pos, first, last, seq_len)
        v = jnp.where(seen[None, :, None], tile.v[0], 0.0)
        visible = mask.visible(key_pos[None], pos[:, None], pos[:, None], seq_len) & (pos[:, None] >= 0)
        visible = jnp.repeat(visible, group, axis=0)[None]
        return online_softmax.merge(state, online_softmax.attend(q, tile.k[0], v, visible, problem.soft_cap))

    return lax.fori_loop(0, -(-run.num_pages // tiles.tile_pages), trip, state)


def _put(buffer: jax.Array, new: jax.Array, start: jax.Array, keep: jax.Array) -> jax.Array:
    """`buffer` with `new` at rows `start ...` where `keep`."""
    old = lax.dynamic_slice_in_dim(buffer, start, new.shape[0], axis=0)
    new = jnp.where(keep.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return lax.dynamic_update_slice_in_dim(buffer, new, start, axis=0)

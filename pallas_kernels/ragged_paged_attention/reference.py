"""ragged_paged_attention in plain jnp: the specification, and the fast path on CPU.

Flow:    api -> [reference] -> (out, lse)

Query tiles of about 128 rows (queries times query heads of a KV head) meet KV tiles of about 128 keys (`tile_walk`);
each merges its part into the softmax state of its query tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import online_softmax
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.online_softmax import SoftmaxState
from pallas_kernels.ragged_paged_attention.paged_tiles import KVTile, PagedTiles
from pallas_kernels.ragged_paged_attention.schedule import Batch
from pallas_kernels.ragged_paged_attention.tile_walk import TileReader, walk

_TILE_ROWS = 128


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
    cache = PagedTiles(pages, block_tables, num_kv_heads, q.shape[-1])
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    heads = by_kv_head(q, num_kv_heads) * sm_scale * _per_head(k_scale)
    state = online_softmax.empty(heads.shape[:3], cache.head_dim_v)
    state = attend_pages(heads, cache, mask, batch, soft_cap=soft_cap, state=state)
    out, lse = finish(state, sinks, v_scale)
    return out.astype(q.dtype), lse


def by_kv_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[T, Hq, D] as float32[Hkv, T, Hq // Hkv, D]."""
    return q.astype(jnp.float32).reshape(q.shape[0], num_kv_heads, -1, q.shape[-1]).swapaxes(0, 1)


def attend_pages(
    q: jax.Array,  # float32[Hkv, T, G, D], scaled
    cache: TileReader,
    mask: MaskRule,
    batch: Batch,
    *,
    soft_cap: float | None,
    state: SoftmaxState,  # of [Hkv, T, G] rows
) -> SoftmaxState:
    """`state` after all keys of `cache` that each query token sees."""
    group = q.shape[2]

    def body(state: SoftmaxState, q: jax.Array, kv: KVTile, visible: jax.Array) -> SoftmaxState:
        rows = jnp.repeat(visible, group, axis=0)[None]
        merged = [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (*state, q)]
        new = online_softmax.attend(SoftmaxState(*merged[:3]), merged[3], kv.k, kv.v, rows, soft_cap)
        return jax.tree.map(lambda x, y: y.reshape(x.shape), state, new)

    return walk(cache, mask, batch, body, q, state, queries=max(8, _TILE_ROWS // group))


def finish(
    state: SoftmaxState,  # of [Hkv, T, G] rows
    sinks: jax.Array | None,  # [Hq]
    v_scale: jax.Array | None,  # [] or [Hkv]
) -> tuple[jax.Array, jax.Array]:
    """(out float32[T, Hq, Dv], lse float32[T, Hq])."""
    num_kv_heads, num_tokens, group = state.m.shape
    per_row = None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group)
    out, lse = online_softmax.finish(state, per_row)
    out = out * _per_head(v_scale)
    return out.swapaxes(0, 1).reshape(num_tokens, -1, out.shape[-1]), lse.swapaxes(0, 1).reshape(num_tokens, -1)


def _per_head(scale: jax.Array | None) -> jax.Array:
    """A scale [] or [num_kv_heads] as float32[1 or num_kv_heads, 1, 1, 1]."""
    return jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(-1, 1, 1, 1)

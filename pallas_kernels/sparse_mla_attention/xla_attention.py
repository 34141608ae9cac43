"""sparse_mla_attention in plain XLA, vectorised: what GPUs run whose kernels cannot take a call.

Flow:    schedule, window pages -> the reference's two passes, over larger tiles -> sinks -> (out, lse)

A tile's entries are gathered once, decoded to the dtype of the queries where that holds them, and read by both
products. What a tile gathers and computes is at most `_TILE_BYTES`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.backends import XlaPath
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_pages import EntryCache
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.sparse_mla_attention.reference import compressed_pass, window_pass
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule
from pallas_kernels.token_places import EntryTiles
from pallas_kernels.xla.tiles import product
from pallas_kernels.xla.walks import product_dtype

_TILE_BYTES = 64 << 20
_MOST_ENTRIES = 512


def path_over(
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    sliding_window: int,
    entry_page_size: int,
    compressed_tables: jax.Array | None,
    num_picks: int | None,
) -> XlaPath:
    """What a call costs: entries are read, written, and read by both products."""
    num_named = 0 if compressed_tables is None else compressed_tables.shape[1] * entry_page_size
    num_named = num_named if num_picks is None else num_picks
    state_bytes = pages[0].shape[-1] * pages[0].dtype.itemsize
    return XlaPath(4, q.shape[0] * (sliding_window + num_named) * state_bytes, "the entries that its tokens name")


@functools.partial(
    jax.jit, static_argnames=("sm_scale", "tokens_per_state", "entries", "page_size", "entry_page_size", "sizes")
)
def sparse_mla_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],
    schedule: SparseSchedule,
    compressed_pages: tuple[jax.Array, ...] | None,
    compressed_tables: jax.Array | None,  # int32[S, Pc]
    topk_indices: jax.Array | None,  # int32[T, K]
    sinks: jax.Array | None,  # [Hq]
    *,
    sm_scale: float,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
    entry_page_size: int,
    sizes: EntryTiles | None = None,  # None: by the shapes
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    dim = q.shape[-1]
    heads = q.astype(_dtype(q.dtype, pages[0].dtype, entries))
    sizes = sizes or tiles_for(heads)
    attend = functools.partial(_attend, scale=sm_scale)
    state = window_pass(heads, EntryCache.of(pages, entries, dim, page_size), schedule, attend, sizes)
    if compressed_pages is not None and compressed_tables is not None:
        cache = EntryCache.of(compressed_pages, entries, dim, entry_page_size)
        named = (compressed_tables, schedule.seq, schedule.num_entries(tokens_per_state), topk_indices)
        state = compressed_pass(state, heads, cache, *named, attend, sizes)
    out, lse = online_softmax.finish(state, None if sinks is None else sinks.astype(jnp.float32)[None])
    return out.astype(q.dtype), lse


def _dtype(q_dtype: jnp.dtype, page_dtype: jnp.dtype, entries: EntryFormat) -> jnp.dtype:
    """In which queries and entries are multiplied; float16 does not hold the range of entries with scales."""
    if entries != Plain() and q_dtype == jnp.float16:
        return jnp.dtype(jnp.float32)
    return product_dtype(q_dtype, page_dtype)


def tiles_for(q: jax.Array) -> EntryTiles:
    """Tokens and entries of a tile for queries [T, Hq, D]: up to `_MOST_ENTRIES`, then as many tokens as fit."""
    num_tokens, num_heads, dim = q.shape
    entry_bytes = q.dtype.itemsize * dim + num_heads * (4 + q.dtype.itemsize)
    return EntryTiles(min(num_tokens, max(1, _TILE_BYTES // (_MOST_ENTRIES * entry_bytes))), _MOST_ENTRIES)


def _attend(state: SoftmaxState, q: jax.Array, cache: EntryCache, slots: jax.Array, *, scale: float) -> SoftmaxState:
    """`state` of [n, Hq] rows after the entries in `slots` int32[n, E], -1: none."""
    rows = lax.optimization_barrier(cache.read(slots).astype(q.dtype))
    s = jnp.where((slots >= 0)[:, None], product("nhd,nkd->nhk", q, rows) * scale, -jnp.inf)
    return online_softmax.update(state, s, lambda p: product("nhk,nkd->nhd", p.astype(rows.dtype), rows))

"""sparse_mla_attention in plain jnp: the specification, and the CPU path.

Flow:    schedule, window pages -> [window_pass] -> (m, weight, total) -> [compressed_pass] -> sinks -> (out, lse)

Every token gathers the entries that it names, a tile at a time (`over_entries`): slots of the window first, then
compressed entries, into one softmax state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.latent_pages import EntryCache
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule
from pallas_kernels.token_places import EntryTiles, over_entries
from pallas_kernels.varying import vary_like

# State of [n, Hq] rows, their queries, cache, slots int32[n, E] or -1 -> state after the entries in these slots.
Attend: TypeAlias = Callable[[SoftmaxState, jax.Array, EntryCache, jax.Array], SoftmaxState]


@functools.partial(jax.jit, static_argnames=("sm_scale", "tokens_per_state", "entries", "page_size", "entry_page_size"))
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
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    heads, dim = q.astype(jnp.float32) * sm_scale, q.shape[-1]
    state = window_pass(heads, EntryCache.of(pages, entries, dim, page_size), schedule, _attend, EntryTiles())
    if compressed_pages is not None and compressed_tables is not None:
        cache = EntryCache.of(compressed_pages, entries, dim, entry_page_size)
        named = (compressed_tables, schedule.seq, schedule.num_entries(tokens_per_state), topk_indices)
        state = compressed_pass(state, heads, cache, *named, _attend, EntryTiles())
    out, lse = online_softmax.finish(state, None if sinks is None else sinks.astype(jnp.float32)[None])
    return out.astype(q.dtype), lse


def window_pass(
    q: jax.Array, cache: EntryCache, schedule: SparseSchedule, attend: Attend, sizes: EntryTiles
) -> SoftmaxState:
    """State of [T, Hq, D] queries, as `attend` takes them, after the slots of their windows."""
    state = vary_like(online_softmax.empty(q.shape[:2], cache.dim), q, cache.latent.array, *schedule[:3])
    if not schedule.window_slots.shape[1]:
        return state

    def body(state: SoftmaxState, inputs: tuple[jax.Array, jax.Array], column: jax.Array) -> SoftmaxState:
        q, slots = inputs
        return attend(state, q, cache, _columns(slots, column))

    return over_entries(body, state, (q, schedule.window_slots), schedule.num_window_slots, sizes)


def compressed_pass(
    state: SoftmaxState,  # of [T, Hq] rows
    q: jax.Array,  # [T, Hq, D] as `attend` takes them
    cache: EntryCache,
    block_tables: jax.Array,  # int32[S, Pc]
    seq: jax.Array,  # int32[T]
    counts: jax.Array,  # int32[T] entries that a token may see
    topk_indices: jax.Array | None,  # int32[T, K] those that it sees; None: all
    attend: Attend,
    sizes: EntryTiles,
) -> SoftmaxState:
    """`state` after the compressed entries."""
    inputs = (q, seq, counts, topk_indices)
    state = vary_like(state, cache.latent.array, block_tables, *jax.tree.leaves(inputs))

    def body(state: SoftmaxState, inputs: Any, column: jax.Array) -> SoftmaxState:
        q, seq, counts, named = inputs
        entry = jnp.broadcast_to(column, (q.shape[0], column.size)) if named is None else _columns(named, column)
        seen = (entry >= 0) & (entry < counts[:, None])
        slots = cache.slots(block_tables, seq[:, None], jnp.maximum(entry, 0))
        return attend(state, q, cache, jnp.where(seen, slots, -1))

    num_named = counts if topk_indices is None else jnp.where(counts > 0, topk_indices.shape[1], 0)
    return over_entries(body, state, inputs, num_named, sizes)


def _columns(table: jax.Array, column: jax.Array) -> jax.Array:
    """int32[n, E] `table[:, column]`, -1 beyond its last column."""
    return table.at[:, column].get(mode="fill", fill_value=-1)


def _attend(state: SoftmaxState, q: jax.Array, cache: EntryCache, slots: jax.Array) -> SoftmaxState:
    """`state` of [n, Hq] rows after the entries in `slots` int32[n, E], -1: none."""
    rows = cache.read(slots)
    return online_softmax.attend(state, q, rows, rows, (slots >= 0)[:, None], None)

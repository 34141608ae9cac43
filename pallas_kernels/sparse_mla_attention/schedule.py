"""What all layers of one kind share in a step: where its tokens stand, which slots their windows are, who does what.

Flow:    block tables and lengths of the window cache -> [plan] -> SparseSchedule -> sparse_mla_attention of each layer
Source:  window indices as vLLM's sparse_swa metadata: for a token at `pos` the slots of `max(0, pos - W + 1) ... pos`
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.latent_pages import state_slots
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.schedule import Batch
from pallas_kernels.sparse_mla_attention.tpu_items import TILE_QUERIES, TpuItems, plan_items
from pallas_kernels.token_places import TokenPlaces


class SparseSchedule(NamedTuple):
    """Places of the query tokens, their windows, and the work of the TPU kernels."""

    seq: jax.Array  # int32[T] row of the token's sequence
    pos: jax.Array  # int32[T] its position, -1 for padding
    window_slots: jax.Array  # int32[T, sliding_window] oldest first, -1 after the last
    decode: TpuItems  # of the decode sequences
    tiles: TpuItems  # of the others

    @property
    def num_window_slots(self) -> jax.Array:
        """int32[T], slots of each window that are none of -1."""
        return jnp.minimum(self.pos + 1, self.window_slots.shape[1])

    def num_entries(self, tokens_per_state: int) -> jax.Array:
        """int32[T], compressed entries whose tokens all stand at or before the token."""
        return (self.pos + 1) // tokens_per_state


@functools.partial(jax.jit, static_argnames=("num_tokens", "sliding_window", "page_size"))
def plan(
    block_tables: jax.Array,  # int32[S, P] of the window cache
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    num_tokens: int,
    sliding_window: int,
    page_size: int,  # states of a page of the window cache
) -> SparseSchedule:
    """The schedule of one step and one window cache, for all layers that have it, compressed caches or not."""
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    places = TokenPlaces.of_batch(batch, num_tokens)
    pos = places.pos[:, None]
    key = MaskRule(sliding_window=sliding_window).lower(pos) + jnp.arange(sliding_window, dtype=jnp.int32)
    slots = state_slots(block_tables, page_size, places.seq[:, None], key)
    is_decode = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < distribution[0]

    def items(rows: jax.Array, num_tokens: int, queries: int) -> TpuItems:
        own = batch._replace(q_lens=jnp.where(rows, batch.q_lens, 0))
        sizes = {"sliding_window": sliding_window, "page_size": page_size}
        return plan_items(own, block_tables, num_tokens=num_tokens, queries=queries, **sizes)

    decode = items(is_decode, min(num_tokens, seq_lens.shape[0]), 1)
    tiles = items(~is_decode, num_tokens, TILE_QUERIES)
    return SparseSchedule(*places, jnp.where(key <= pos, slots, -1), decode, tiles)

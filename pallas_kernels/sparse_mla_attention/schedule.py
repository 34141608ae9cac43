"""What all layers of one kind share in a step: where its tokens stand, which slots their windows are, who does what.

Flow:    block tables and lengths of the window cache -> [plan] -> SparseSchedule -> sparse_mla_attention of each layer
Source:  window indices as vLLM's sparse_swa metadata: for a token at `pos` the slots of `max(0, pos - W + 1) ... pos`
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.latent_pages import state_slots
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch
from pallas_kernels.token_places import TokenPlaces
from pallas_kernels.tpu.token_blocks import TILE_QUERIES, Field, TokenBlocks, both_kinds, rows_from


class WindowBlocks(NamedTuple):
    """The items of one launch, and the pages of their windows."""

    blocks: TokenBlocks
    pages: jax.Array  # int32[room * n] pages of each item's windows, in order

    @classmethod
    def of(
        cls, blocks: TokenBlocks, block_tables: jax.Array, mask: MaskRule, queries: int, page_size: int
    ) -> WindowBlocks:
        """The window blocks of items with blocks of `queries` tokens."""
        pos, end = blocks.field(Field.POS), blocks.field(Field.END)
        run = mask.page_run(pos + blocks.field(Field.BEGIN), pos + end - 1, 0, page_size)
        num_pages = mask.max_pages(queries, block_tables.shape[1], page_size)
        column = run.first_page[:, None] + jnp.arange(num_pages, dtype=jnp.int32)
        pages = block_tables.at[blocks.field(Field.SEQ)[:, None], column].get(mode="clip")
        return cls(blocks, pages.reshape(-1))

    def part(self, first_block: jax.Array, num_blocks: int, room: int) -> WindowBlocks:
        """The items of `num_blocks` blocks of tokens from `first_block` on, at most `room`, numbered from it."""
        blocks, begin = self.blocks.part(first_block, num_blocks, room)
        pages = rows_from(self.pages.reshape(self.blocks.room, -1), begin, room)
        return WindowBlocks(blocks, pages.reshape(-1))


class SparseSchedule(NamedTuple):
    """Places of the query tokens, their windows, and the work of the TPU kernels."""

    seq: jax.Array  # int32[T] row of the token's sequence
    pos: jax.Array  # int32[T] its position, -1 for padding
    window_slots: jax.Array  # int32[T, sliding_window] oldest first, -1 after the last
    decode: WindowBlocks  # of the decode sequences, token by token
    tiles: WindowBlocks  # of the others

    @property
    def num_window_slots(self) -> jax.Array:
        """int32[T], slots of each window that are none of -1."""
        return jnp.minimum(self.pos + 1, self.window_slots.shape[1])

    def num_entries(self, tokens_per_state: int) -> jax.Array:
        """int32[T], compressed entries whose tokens all stand at or before the token."""
        return (self.pos + 1) // tokens_per_state


@by_default_rules
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
    pos, mask = places.pos[:, None], MaskRule(sliding_window=sliding_window)
    key = mask.lower(pos) + jnp.arange(sliding_window, dtype=jnp.int32)
    slots = state_slots(block_tables, page_size, places.seq[:, None], key)
    blocks = both_kinds(batch, distribution, num_tokens)
    decode, tiles = (
        WindowBlocks.of(kind, block_tables, mask, queries, page_size)
        for kind, queries in zip(blocks, (1, TILE_QUERIES), strict=True)
    )
    return SparseSchedule(*places, jnp.where(key <= pos, slots, -1), decode, tiles)

"""What the GPU kernel of sparse attention does in one step: rows of both caches per token, pieces of thread blocks.

Flow:    SparseSchedule, compressed tables + SparseSizes -> [SparseWork.of], once a step -> every layer of the kind
         picks of a layer + SparseWork -> [SparseWork.picked_slots] -> lists of that layer -> gpu_attend

Every token attends alone, since no two see the same entries. What it sees stands in two *lists* of rows of a cache,
its window's and its entries', -1 where one is none, in blocks of 64:

    rows     w0 ... w63 | w64 ... w127 | e0 ... e63 | e64 ... e90 -1 ... -1 |
    block        0             1             2               3

All lists are in one array; where all entries are seen, the tokens of a sequence share a list and differ in how much of
it they see. Where entries are picked, each layer has lists of its own beside those of the windows. How long these are
no plan can know: its pieces have room for all that a token may pick, and end where the layer's list does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gpu.shares import share_out
from pallas_kernels.latent_pages import state_slots
from pallas_kernels.layouts import cdiv
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule

BLOCK = 64  # rows that are attended at once


class Field(enum.IntEnum):
    """Scalars of a piece: some blocks of one token, for a part of its heads."""

    TILE = 0  # of queries: token * parts + part
    WINDOW = 1  # where its window's list begins
    ENTRIES = 2  # where its entries' list begins
    WINDOW_BLOCKS = 3  # blocks of the window
    NUM_ENTRIES = 4  # what it sees of the entries' list, or may pick
    FIRST = 5  # first block
    END = 6  # one after the last


class SparseSizes(NamedTuple):
    """All that the work of a kind of layers depends on beside the step."""

    num_tokens: int
    window: int  # slots
    num_columns: int  # of the compressed cache's tables; 0: the layers have their window only
    entry_page_size: int
    tokens_per_state: int
    num_picks: int | None  # of a token; None: it sees all entries
    head_parts: int  # tiles of a token
    num_blocks: int  # thread blocks that fewer tiles are split over

    @property
    def window_rows(self) -> int:
        """Rows of a window's list."""
        return cdiv(self.window, BLOCK) * BLOCK

    @property
    def entry_rows(self) -> int:
        """Rows of a list of entries."""
        num = self.num_columns * self.entry_page_size if self.num_picks is None else self.num_picks
        return cdiv(num, BLOCK) * BLOCK

    @property
    def has_picks(self) -> bool:
        """Whether lists of entries are a layer's own."""
        return self.num_columns > 0 and self.num_picks is not None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseWork:
    """What the layers of a kind do in one step; `sizes` are static."""

    seq: jax.Array  # int32[T] row of each token's sequence
    counts: jax.Array  # int32[T] entries that a token may see
    rows: jax.Array  # int32[n] all lists but those of picks
    pieces: jax.Array  # int32[pieces, fields]
    blocks: jax.Array  # int32[C, 2] first piece of each thread block, and one after its last
    units: jax.Array | None  # int32[T * head_parts, 2] as in Shares, where tokens are split into pieces
    sizes: SparseSizes = field(metadata={"static": True})

    @classmethod
    def of(cls, schedule: SparseSchedule, tables: jax.Array | None, sizes: SparseSizes) -> SparseWork:
        """The work of a step over compressed `tables` int32[S, Pc]."""
        token = jnp.arange(sizes.num_tokens, dtype=jnp.int32)
        slots = _padded(schedule.window_slots, sizes.window_rows)
        counts = schedule.num_entries(sizes.tokens_per_state)
        rows = [slots.reshape(-1)]
        window_blocks = -(-schedule.num_window_slots // BLOCK)
        num, first_entry, num_entries = window_blocks, jnp.zeros_like(token), jnp.zeros_like(token)
        if tables is not None and sizes.num_columns:
            own, num_entries = token, jnp.where(counts > 0, sizes.num_picks or 0, 0)
            if sizes.num_picks is None:
                own, num_entries = schedule.seq, counts
                rows.append(_all_entries(tables, sizes).reshape(-1))
            first_entry = (0 if sizes.has_picks else slots.size) + own * sizes.entry_rows
            num = num + -(-num_entries // BLOCK)
        parts = sizes.head_parts
        columns = jnp.stack([token * sizes.window_rows, first_entry, window_blocks, num_entries], axis=1)
        tile = jnp.arange(sizes.num_tokens * parts, dtype=jnp.int32)
        fixed, num = jnp.repeat(columns, parts, axis=0), jnp.repeat(num, parts)
        if tile.shape[0] < sizes.num_blocks:
            shares = share_out(num, sizes.num_blocks)
            tile, first, end, fixed = shares.unit, shares.first, shares.end, fixed[shares.unit]
            blocks, units = shares.blocks, shares.units
        else:
            first, end, units = jnp.zeros_like(num), num, None
            blocks = jnp.stack([tile, tile + 1], axis=1)
        pieces = jnp.concatenate([tile[:, None], fixed, first[:, None], end[:, None]], axis=1).astype(jnp.int32)
        return cls(schedule.seq, counts, jnp.concatenate(rows), pieces, blocks, units, sizes)

    def num_picked(self, picks: jax.Array) -> jax.Array:
        """int32[T]: places of int32[T, K] `picks` up to the last that a token sees."""
        place = jnp.arange(picks.shape[1], dtype=jnp.int32)
        return lax.reduce(jnp.where(self._sees(picks), place + 1, 0), np.int32(0), lax.max, (1,))

    def picked_slots(self, tables: jax.Array, picks: jax.Array) -> jax.Array:
        """int32[T, entry rows]: slots of what int32[T, K] `picks` name and tokens see, or -1."""
        slots = state_slots(tables, self.sizes.entry_page_size, self.seq[:, None], jnp.maximum(picks, 0))
        return _padded(jnp.where(self._sees(picks), slots, -1), self.sizes.entry_rows)

    def _sees(self, picks: jax.Array) -> jax.Array:
        return (picks >= 0) & (picks < self.counts[:, None])


def _all_entries(tables: jax.Array, sizes: SparseSizes) -> jax.Array:
    """int32[S, entry rows], the list of each sequence."""
    num_entries = sizes.num_columns * sizes.entry_page_size
    entry, seq = jnp.arange(num_entries, dtype=jnp.int32), jnp.arange(tables.shape[0], dtype=jnp.int32)[:, None]
    return _padded(state_slots(tables, sizes.entry_page_size, seq, entry), sizes.entry_rows)


def _padded(rows: jax.Array, num: int) -> jax.Array:
    """Lists [lists, ...] of `num` rows."""
    return jnp.pad(rows, [(0, 0), (0, num - rows.shape[1])], constant_values=-1)

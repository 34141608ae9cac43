"""What the GPU kernel of sparse attention does in one step: rows of both caches per token, pieces of thread blocks.

Flow:    SparseSchedule, compressed tables, picks -> [SparseWork.of] -> int32 tables -> gpu_attend

Every token attends alone, since no two see the same entries. What it sees stands in two *lists* of rows of a cache,
its window's and its entries', -1 where one is none, in blocks of 64:

    rows     w0 ... w63 | w64 ... w127 | e0 ... e63 | e64 ... e90 -1 ... -1 |
    block        0             1             2               3

All lists are in one array; where all entries are seen, the tokens of a sequence share a list and differ in how much of
it they see.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.latent_pages import state_slots
from pallas_kernels.ragged_paged_attention.gpu_shares import share_out
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule

BLOCK = 64  # rows that are attended at once


class Field(enum.IntEnum):
    """Scalars of a piece: some blocks of one token, for a part of its heads."""

    TILE = 0  # of queries: token * parts + part
    WINDOW = 1  # where its window's list begins
    ENTRIES = 2  # where its entries' list begins
    WINDOW_BLOCKS = 3  # blocks of the window
    NUM_ENTRIES = 4  # what it sees of the entries' list
    FIRST = 5  # first block
    END = 6  # one after the last


class Lists(NamedTuple):
    """Rows of one cache, and what each token sees of them."""

    rows: jax.Array  # int32[lists, n], n a multiple of 64, -1: none
    own: jax.Array  # int32[T] the list of a token
    num_seen: jax.Array  # int32[T] rows of it that a token sees, holes included

    @classmethod
    def of(cls, rows: jax.Array, own: jax.Array, num_seen: jax.Array) -> Lists:
        """Of lists of any length."""
        return cls(jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % BLOCK)], constant_values=-1), own, num_seen)

    @property
    def blocks(self) -> jax.Array:
        """int32[T], blocks that a token sees."""
        return -(-self.num_seen // BLOCK)


def window_lists(schedule: SparseSchedule) -> Lists:
    """Windows: a list per token."""
    token = jnp.arange(schedule.pos.shape[0], dtype=jnp.int32)
    return Lists.of(schedule.window_slots, token, schedule.num_window_slots)


def entry_lists(
    schedule: SparseSchedule,
    tables: jax.Array,  # int32[S, Pc]
    topk_indices: jax.Array | None,  # int32[T, K]; None: all entries
    tokens_per_state: int,
    page_size: int,  # entries of a page
) -> Lists:
    """Compressed entries: a list per token, or where all are seen, per sequence."""
    counts, token = schedule.num_entries(tokens_per_state), jnp.arange(schedule.pos.shape[0], dtype=jnp.int32)
    if topk_indices is not None:
        seen = (topk_indices >= 0) & (topk_indices < counts[:, None])
        slots = state_slots(tables, page_size, schedule.seq[:, None], jnp.maximum(topk_indices, 0))
        place = jnp.arange(topk_indices.shape[1], dtype=jnp.int32)
        return Lists.of(jnp.where(seen, slots, -1), token, jnp.max(jnp.where(seen, place + 1, 0), axis=1, initial=0))
    entry = jnp.arange(tables.shape[1] * page_size, dtype=jnp.int32)
    slots = state_slots(tables, page_size, jnp.arange(tables.shape[0], dtype=jnp.int32)[:, None], entry)
    return Lists.of(slots, schedule.seq, counts)


class SparseWork(NamedTuple):
    """Lists of one call, and who attends them."""

    rows: jax.Array  # int32[n] all lists
    pieces: jax.Array  # int32[pieces, fields]
    blocks: jax.Array  # int32[C, 2] first piece of each thread block, and one after its last
    units: jax.Array | None  # int32[T * parts, 2] as in Shares, where tokens are split into pieces

    @classmethod
    def of(cls, window: Lists, entries: Lists | None, parts: int, num_blocks: int) -> SparseWork:
        """Of tokens whose heads are in `parts`; split into pieces where they are fewer than `num_blocks`."""
        columns = [
            window.own * window.rows.shape[1],
            jnp.zeros_like(window.own),
            window.blocks,
            jnp.zeros_like(window.own),
        ]
        rows, num = [window.rows.reshape(-1)], window.blocks
        if entries is not None:
            columns[1] = window.rows.size + entries.own * entries.rows.shape[1]
            columns[3] = entries.num_seen
            rows.append(entries.rows.reshape(-1))
            num = num + entries.blocks
        tile = jnp.arange(num.shape[0] * parts, dtype=jnp.int32)
        fixed, num = jnp.repeat(jnp.stack(columns, axis=1), parts, axis=0), jnp.repeat(num, parts)
        if tile.shape[0] < num_blocks:
            shares = share_out(num, num_blocks)
            tile, first, end, fixed = shares.unit, shares.first, shares.end, fixed[shares.unit]
            blocks, units = shares.blocks, shares.units
        else:
            first, end, units = jnp.zeros_like(num), num, None
            blocks = jnp.stack([tile, tile + 1], axis=1)
        own = [tile[:, None], fixed, first[:, None], end[:, None]]
        return cls(jnp.concatenate(rows), jnp.concatenate(own, axis=1).astype(jnp.int32), blocks, units)

"""What the TPU kernels of a step go through: items, each some query tokens of one sequence in one block of tokens.

Flow:    lengths of the step + window's tables -> [plan_items] -> TpuItems, once per step -> launches of every layer

Tokens come in aligned blocks of `queries`. A block with tokens of several sequences has an item for each, one after the
other, so that their results gather in the same block of the output.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import cdiv
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.schedule import Batch

TILE_QUERIES = 8  # query tokens of a block where sequences have more than one


class Field(enum.IntEnum):
    """Scalars of an item."""

    SEQ = 0  # row of its sequence
    BLOCK = 1  # its block of tokens
    BEGIN = 2  # its first token in the block
    END = 3  # one after its last
    POS = 4  # position of the block's first token, were it of this sequence


class TpuItems(NamedTuple):
    """The items of one launch: of the tokens that are alone in their sequence, or of tiles of the others."""

    table: jax.Array  # int32[fields * room]
    num_items: jax.Array  # int32[] how many there are
    window_pages: jax.Array  # int32[room * n] pages of each item's windows, in order

    @property
    def room(self) -> int:
        """Most items."""
        return self.table.shape[0] // len(Field)


def plan_items(
    batch: Batch,
    block_tables: jax.Array,  # int32[S, P] of the window cache
    *,
    num_tokens: int,
    queries: int,
    sliding_window: int,
    page_size: int,
) -> TpuItems:
    """Items of the sequences with queries in `batch`, in blocks of `queries` tokens."""
    num_seqs, num_columns = block_tables.shape
    room = min(num_tokens, cdiv(num_tokens, queries) + num_seqs)
    end = batch.starts + batch.q_lens
    first_block = batch.starts // queries
    counts = jnp.where(batch.q_lens > 0, (end - 1) // queries - first_block + 1, 0)
    item_ends = jnp.cumsum(counts, dtype=jnp.int32)
    n = jnp.arange(room, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(item_ends[None] <= n[:, None], axis=1, dtype=jnp.int32), num_seqs - 1)
    live = n < item_ends[-1]
    block = jnp.where(live, (first_block + counts - item_ends)[seq] + n, 0)
    fields = {
        Field.SEQ: seq,
        Field.BLOCK: block,
        Field.BEGIN: jnp.maximum(batch.starts[seq] - block * queries, 0),
        Field.END: jnp.minimum(end[seq] - block * queries, queries),
        Field.POS: (batch.seq_lens - end)[seq] + block * queries,
    }
    table = jnp.stack([jnp.where(live, fields[field], 0) for field in Field])
    mask = MaskRule(sliding_window=sliding_window)
    num_pages = mask.max_pages(queries, num_columns, page_size)
    run = mask.page_run(table[Field.POS] + table[Field.BEGIN], table[Field.POS] + table[Field.END] - 1, 0, page_size)
    column = run.first_page[:, None] + jnp.arange(num_pages, dtype=jnp.int32)
    pages = block_tables.at[table[Field.SEQ][:, None], column].get(mode="clip")
    return TpuItems(table.reshape(-1), item_ends[-1], pages.reshape(-1))

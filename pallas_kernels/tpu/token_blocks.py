"""What the TPU kernels of sparse attention and its indexer go through: items, each some query tokens of one sequence.

Flow:    lengths of the step -> [plan_blocks] -> TokenBlocks -> launches

Tokens come in aligned blocks of `queries`. A block with tokens of several sequences has an item for each, one after the
other, so that their results gather in the same block of the output.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import cdiv
from pallas_kernels.schedule import Batch

TILE_QUERIES = 8  # query tokens of a block where sequences have more than one


class Field(enum.IntEnum):
    """Scalars of an item."""

    SEQ = 0  # row of its sequence
    BLOCK = 1  # its block of tokens
    BEGIN = 2  # its first token in the block
    END = 3  # one after its last
    POS = 4  # position of the block's first token, were it of this sequence


class TokenBlocks(NamedTuple):
    """The items of one launch."""

    table: jax.Array  # int32[fields * room]
    num_items: jax.Array  # int32[] how many there are

    @property
    def room(self) -> int:
        """Most items."""
        return self.table.shape[0] // len(Field)

    def field(self, field: Field) -> jax.Array:
        """int32[room]"""
        return self.table.reshape(len(Field), -1)[field]

    def part(self, first_block: jax.Array, num_blocks: int, room: int) -> tuple[TokenBlocks, jax.Array]:
        """(the items of `num_blocks` blocks from `first_block` on, at most `room`, numbered from it; their first)."""
        is_real = jnp.arange(self.room, dtype=jnp.int32) < self.num_items
        begin, end = (
            jnp.sum(is_real & (self.field(Field.BLOCK) < border), dtype=jnp.int32)
            for border in (first_block, first_block + num_blocks)
        )
        fields = rows_from(self.table.reshape(len(Field), -1).T, begin, room)
        block = jnp.clip(fields[:, Field.BLOCK] - first_block, 0, num_blocks - 1)  # of what is no item, too
        return TokenBlocks(fields.at[:, Field.BLOCK].set(block).T.reshape(-1), end - begin), begin


def rows_from(x: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """Rows `first ... first + count` of x; 0 beyond its end."""
    return lax.dynamic_slice_in_dim(jnp.pad(x, [(0, count), *[(0, 0)] * (x.ndim - 1)]), first, count)


def both_kinds(batch: Batch, distribution: jax.Array, num_tokens: int) -> tuple[TokenBlocks, TokenBlocks]:
    """(blocks of one token for the decode sequences, of TILE_QUERIES for the others)."""
    is_decode = jnp.arange(batch.q_lens.shape[0], dtype=jnp.int32) < distribution[0]
    decode, others = (batch._replace(q_lens=jnp.where(own, batch.q_lens, 0)) for own in (is_decode, ~is_decode))
    room = min(num_tokens, batch.q_lens.shape[0])
    return plan_blocks(decode, num_tokens=room, queries=1), plan_blocks(
        others, num_tokens=num_tokens, queries=TILE_QUERIES
    )


def plan_blocks(batch: Batch, *, num_tokens: int, queries: int) -> TokenBlocks:
    """Items of the sequences with queries in `batch`, in blocks of `queries` tokens."""
    num_seqs = batch.q_lens.shape[0]
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
    return TokenBlocks(table.reshape(-1), item_ends[-1])

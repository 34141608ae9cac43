"""How the new tokens of a step are cut up for the TPU kernels: decode tokens apart, all others in segments of chunks.

Flow:    StateStep + distribution -> [plan_segments], [decode_pages] -> int32 tables in SMEM

A *chunk* is `chunk` successive tokens of the step, whatever sequences they belong to, so that a grid's pipeline moves
whole blocks. A *segment* is the part of one piece of a sequence (`state_step`) inside one chunk; segments are in the
order of tokens, and one that does not begin its sequence continues the one before it. A segment may *peek*: it leaves a
state inside the chunk, and the next one starts where it did, so that outputs of its tokens are made once.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.state_step import StateStep


class Field(enum.IntEnum):
    """Scalars of a segment."""

    CHUNK = 0
    FIRST = 1  # its first token in the chunk
    END = 2  # one after its last
    SEQ = 3  # of a step with checkpoints: its piece
    BEGINS = 4  # 1: its first token is the first new one of the sequence
    READ = 5  # page of the initial state, 0 where there is none or it does not begin
    WRITE = 6  # page for the state after its last token, negative where it peeks, 0 where none is written


class Segments(NamedTuple):
    """Table of the segments of a step."""

    table: jax.Array  # int32[fields * room]
    num_segments: jax.Array  # int32[]


def num_decode_tokens(step: StateStep, distribution: jax.Array) -> jax.Array:
    """int32[] how many tokens decode sequences have: one each, the first of the step.

    A step with room for one token has no segments: its sequence decodes, whatever `distribution` calls it.
    """
    is_decode = jnp.arange(step.q_lens.shape[0]) < distribution[0 if step.seq.shape[0] > 1 else 2]
    return jnp.sum(jnp.where(is_decode, step.q_lens, 0), dtype=jnp.int32)


def decode_pages(step: StateStep, num_decode: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """int32[num_rows] pages that the first tokens read and write, 0 where they do not, as for all but decode tokens."""
    seq = jnp.pad(step.seq[:num_rows], (0, max(0, num_rows - step.seq.shape[0])))
    live = jnp.arange(num_rows) < num_decode
    return jnp.where(live, step.read[seq], 0), jnp.where(live, step.last_write[seq], 0)


def plan_segments(
    step: StateStep, distribution: jax.Array, num_tokens: int, chunk: int, peeks: bool = False
) -> Segments:
    """Segments of all sequences but the decode ones; `peeks`: those that end at checkpoints inside chunks do."""
    is_decode = jnp.arange(step.q_lens.shape[0]) < distribution[0]
    starts, q_lens, read, write, before, goes_on = step._replace(q_lens=jnp.where(is_decode, 0, step.q_lens)).pieces
    num_pieces = q_lens.shape[0]
    room = min(num_tokens, -(-num_tokens // chunk) + num_pieces)
    first_chunk = starts // chunk
    counts = jnp.where(q_lens > 0, (starts + q_lens - 1) // chunk - first_chunk + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    n = jnp.arange(room, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(ends[None] <= n[:, None], axis=1, dtype=jnp.int32), num_pieces - 1)
    index = n - ends[seq] + counts[seq]  # of the segment in its piece
    at = first_chunk[seq] + index
    start, end = starts[seq] - at * chunk, starts[seq] + q_lens[seq] - at * chunk
    begins, is_last = index == 0, index == counts[seq] - 1
    page = jnp.where(is_last, write[seq], 0)
    if before is not None and goes_on is not None:
        begins &= before[seq] == 0
        if peeks:
            start -= before[seq]
            page = jnp.where(goes_on[seq] & (end < chunk), -page, page)
    fields = {
        Field.CHUNK: at,
        Field.FIRST: jnp.maximum(start, 0),
        Field.END: jnp.minimum(end, chunk),
        Field.SEQ: seq,
        Field.BEGINS: begins,
        Field.READ: jnp.where(begins, read[seq], 0),
        Field.WRITE: page,
    }
    table = jnp.stack([jnp.where(n < ends[-1], fields[field], 0) for field in Field])
    return Segments(table.reshape(-1).astype(jnp.int32), ends[-1])

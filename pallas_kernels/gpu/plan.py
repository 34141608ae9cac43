"""What the GPU kernels do in one step: static sizes, the keys of a query tile in blocks, the work list of decoding.

Flow:    shapes + options -> [GpuConfig];  lengths of the step + mask rule -> [plan_decode] -> int32 tables

The keys of a query tile are the slots of its page run (mask.py: sink pages, then a contiguous run), in *blocks* of
`block` slots. Blocks that every query sees whole need no mask and are attended first:

    block    0     1     2     3     4     5
             cut   whole whole whole whole cut          order: 1 2 3 4, 0, 5
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.shares import share_out
from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch

MIN_GROUP_ROWS = 8  # rows of a tile in shared memory come in eights
MIN_STAGES = 2
LARGEST_FLOAT16 = 65504.0


class Field(enum.IntEnum):
    """Scalars of a piece, or of a query tile."""

    SEQ = 0  # row of the block tables
    HEAD = 1  # KV head (decoding)
    FIRST = 2  # first block
    END = 3  # one after the last block
    WHOLE = 4  # first block that every query sees whole
    WHOLE_END = 5
    LOWER = 6  # first key that any query sees, sink tokens apart
    UPPER = 7  # last key that any query sees
    SINK_PAGES = 8  # pages of the run before its contiguous part
    SHIFT = 9  # column of a page of the contiguous part, less its number in the run
    NUM_PAGES = 10
    SINK_TOKENS = 11  # of the sequence; 0 unless the mask has `sinks_by_sequence`
    POS = 12  # position of the first query
    SEQ_LEN = 13


class Keys(NamedTuple):
    """The keys of a query tile, int32[] each (or one array element per tile); see `Field`."""

    first: jax.Array
    end: jax.Array
    whole: jax.Array
    whole_end: jax.Array
    lower: jax.Array
    upper: jax.Array
    sink_pages: jax.Array
    shift: jax.Array
    num_pages: jax.Array
    sink_tokens: jax.Array

    @property
    def num_blocks(self) -> jax.Array:
        """Blocks to attend."""
        return self.end - self.first

    @property
    def num_whole(self) -> jax.Array:
        """Blocks to attend without a mask: the first ones."""
        return lax.max(lax.min(self.end, self.whole_end) - lax.max(self.first, self.whole), 0)

    def block(self, i: jax.Array) -> jax.Array:
        """The `i`-th block to attend: whole ones, then those before, then those after."""
        num_whole = self.num_whole
        after = lax.max(self.first, lax.min(self.whole_end, self.end))
        num_before = lax.max(lax.min(self.whole, self.end) - self.first, 0)
        rest = i - num_whole
        cut = jnp.where(rest < num_before, self.first + rest, after + rest - num_before)
        return jnp.where(i < num_whole, lax.max(self.first, self.whole) + i, cut)

    @classmethod
    def of_piece(cls, pieces: Any, piece: jax.Array) -> Keys:
        """The keys of a row of a table of `Field`."""
        return cls(*(pieces[piece, Field.FIRST + i] for i in range(len(cls._fields))))

    @classmethod
    def of_tiles(
        cls,
        mask: MaskRule,
        first_pos: jax.Array,
        last_pos: jax.Array,
        seq_len: jax.Array,
        page_size: int,
        block: int,
        sink_tokens: jax.Array | None = None,
    ) -> Keys:
        """All keys of query tiles at `[first_pos, last_pos]`; none where `last_pos < 0`. Arrays of one shape."""
        sink_tokens = jnp.zeros_like(seq_len) if sink_tokens is None else sink_tokens
        run = mask.page_run(first_pos, last_pos, seq_len, page_size, sink_tokens)
        shift = run.first_page - run.num_sink_pages
        end = -(-run.num_pages * page_size // block)
        first_seen = mask.first_seen(last_pos, sink_tokens)
        first_whole = jnp.maximum(first_seen - shift * page_size, run.num_sink_pages * page_size)
        slots_whole = mask.upper(first_pos, seq_len) + 1 - shift * page_size
        whole = jnp.clip(-(-first_whole // block), 0, end)
        return cls(
            first=jnp.zeros_like(end),
            end=end,
            whole=whole,
            whole_end=jnp.clip(slots_whole // block, whole, end),
            lower=mask.lower(first_pos),
            upper=mask.upper(last_pos, seq_len),
            sink_pages=run.num_sink_pages,
            shift=shift,
            num_pages=run.num_pages,
            sink_tokens=sink_tokens,
        )


@dataclass(frozen=True)
class GpuConfig:
    """Static description of one launch of an attention kernel."""

    mask: MaskRule
    soft_cap: float | None
    num_kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    head_dim_v: int
    page_size: int
    page_dtype: str
    compute_dtype: str  # of the matrix products' operands: bfloat16 or float16
    block: int  # slots of a KV block, a multiple of 64
    stages: int  # KV blocks on their way or in use
    queries: int = 1  # most tokens of a sequence that share a tile of decoding
    score_factor: float = 1.0  # what products are multiplied with, beside the scale of the keys

    @property
    def padded_rows(self) -> int:
        """Rows of a tile of decoding in shared memory: query heads per KV head, of each of its tokens."""
        return cdiv(self.queries * self.group, MIN_GROUP_ROWS) * MIN_GROUP_ROWS

    @property
    def is_converted(self) -> bool:
        """Whether pages hold 8-bit values, which are converted to `compute_dtype` in shared memory."""
        return self.page_dtype != self.compute_dtype

    @property
    def copy_slots(self) -> int:
        """Slots that one bulk copy moves."""
        return min(self.page_size, self.block)

    @property
    def num_copies(self) -> int:
        """Bulk copies of a block of K, or of V."""
        return self.block // self.copy_slots


def to_compute_dtype(q: jax.Array, config: GpuConfig) -> jax.Array:
    """Queries in the dtype of the matrix products, cut to its range."""
    if q.dtype == jnp.dtype(config.compute_dtype):
        return q
    return jnp.clip(q.astype(jnp.float32), -LARGEST_FLOAT16, LARGEST_FLOAT16).astype(config.compute_dtype)


def reason_of_pages(q_dtype: jnp.dtype, page_dtype: jnp.dtype, page_size: int) -> str | None:
    """What of a call no GPU kernel can do, in words; None if its dtypes and page size fit."""
    q_name, page_name = jnp.dtype(q_dtype).name, jnp.dtype(page_dtype).name
    if q_name not in ("bfloat16", "float16"):
        return f"GPU kernels take bfloat16 or float16 queries, got {q_name}"
    if page_name not in (q_name, "float8_e4m3fn", "float8_e5m2", "int8"):
        return f"GPU kernels take pages of {q_name} as the queries or of 8 bits, got {page_name}"
    if not 8 <= page_size <= 128 or page_size & (page_size - 1):
        return f"GPU kernels take page sizes that are powers of two from 8 to 128, got {page_size}"
    return None


def compute_dtype(dtype: str, page_dtype: str) -> str:
    """float16 for 8-bit floats, which it holds exactly and the hardware converts to; else the queries' dtype."""
    return "float16" if page_dtype.startswith("float8") else dtype


def block_slots(head_dim: int, head_dim_v: int) -> int:
    """Slots of a KV block: scores and accumulated values share the registers of a warpgroup."""
    return 128 if max(head_dim, head_dim_v) <= 128 else 64


def kv_bytes(config: GpuConfig) -> tuple[int, int]:
    """(bytes of shared memory for one stage of K and V, and for the converted copy of a block)."""
    elements = config.block * (config.head_dim + config.head_dim_v)
    return elements * jnp.dtype(config.page_dtype).itemsize, elements * 2 if config.is_converted else 0


def most_stages(free_bytes: int, stage_bytes: int) -> int:
    """Stages of KV blocks that fit, at most 4."""
    return min(4, free_bytes // stage_bytes)


class DecodePlan(NamedTuple):
    """The work list of decoding; a unit is a (sequence, KV head)."""

    pieces: jax.Array  # int32[U + C, fields]
    blocks: jax.Array  # int32[C, 2] as in Shares
    units: jax.Array  # int32[U, 2] as in Shares


def plan_decode(
    batch: Batch,  # of the sequences that decode: others have no queries in it
    config: GpuConfig,
    num_blocks: int,
) -> DecodePlan:
    """The work list of the sequences that decode; those without a query have no work."""
    first, last = batch.positions(config.mask)
    return plan_pieces(first, last, batch.seq_lens, config, num_blocks, batch.sink_tokens)


def plan_pieces(
    first: jax.Array,  # int32[S] position of the first query of each tile
    last: jax.Array,  # int32[S] of the last, -1: it has none
    seq_lens: jax.Array,  # int32[S] of its sequence
    config: GpuConfig,
    num_blocks: int,
    sink_tokens: jax.Array | None = None,  # int32[S] of its sequence, where the mask has them by sequence
) -> DecodePlan:
    """The work list of query tiles of few queries, of which `Field.SEQ` is the number."""
    heads = config.num_kv_heads
    keys = Keys.of_tiles(config.mask, first, last, seq_lens, config.page_size, config.block, sink_tokens)
    shares = share_out(keys.end, num_blocks, repeats=heads)
    unit = shares.unit
    of_seq = jnp.stack([*keys, first, seq_lens], axis=1)[unit // heads]
    of_unit = jnp.stack([unit // heads, unit % heads, shares.first, shares.end], axis=1)
    pieces = jnp.concatenate([of_unit, of_seq[:, 2:]], axis=1).astype(jnp.int32)
    return DecodePlan(pieces, shares.blocks, shares.units)

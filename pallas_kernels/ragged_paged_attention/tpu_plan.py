"""What one launch of the TPU kernel does: its static sizes, and its table of items.

Flow:    shapes + options -> [TpuConfig];  lengths of the step + mask rule -> [plan_items] -> int32 table in SMEM

An *item* is up to `queries` successive query tokens of one sequence. Its KV is the page run of the mask rule (sink
pages, then a contiguous run), read in *blocks* of `block` slots. Steps of an item, in the order they run:

    0 ... num_full              blocks that every row sees whole, without a mask
    ... num_full + num_lead     leading blocks, which sink tokens or lower bounds cut
    ... num_blocks              trailing blocks, which upper bounds or the end cut

The last item of the table has no blocks and stands for the end: `NEXT` of the last item with blocks names it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import LANES, SUBLANES, packing
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.schedule import Batch, query_tiles


class Field(enum.IntEnum):
    """Scalars of an item."""

    TABLE = 0  # first entry of its block table
    TOKEN = 1  # first query token that its tile of queries reads
    SKIP = 2  # tokens of the tile before the item's own
    NUM_QUERIES = 3  # its own tokens
    POS = 4  # position of the tile's first token
    LOWER = 5  # first key that any of its queries sees, sink tokens apart
    UPPER = 6  # last key that any of its queries sees
    BORDER = 7  # first chunk border after its first query
    SINK_PAGES = 8  # pages of its run before the contiguous part
    SHIFT = 9  # column of a page of the contiguous part, less its number in the run
    NUM_PAGES = 10
    NUM_BLOCKS = 11
    NUM_FULL = 12
    NUM_LEAD = 13
    STEP = 14  # blocks of all items before: they tell the buffer of its first block
    NEXT = 15  # the next item that has blocks


class ItemSizes(Protocol):
    """What items and their blocks depend on: part of every kernel's static description."""

    @property
    def mask(self) -> MaskRule:
        """Who sees what."""

    @property
    def queries(self) -> int:
        """Most query tokens of an item; 1: decode."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""

    @property
    def block(self) -> int:
        """Slots of a KV block."""

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""

    @property
    def table_stride(self) -> int:
        """Entries from one row of the block tables to the next."""

    @property
    def tables_in_hbm(self) -> bool:
        """Whether the block tables exceed scalar memory."""


@dataclass(frozen=True)
class TpuConfig:
    """Static description of one launch."""

    mask: MaskRule
    sm_scale: float
    soft_cap: float | None
    num_kv_heads: int
    group: int  # query heads per KV head
    lanes: int  # head dimension as pages hold it, a multiple of 128
    page_size: int
    compute_dtype: str  # of the matrix products' operands: bfloat16 or float32
    pushed_dtype: str  # of keys and values in them: the same, or that of the pages
    queries: int  # most query tokens of an item; 1: decode
    block: int  # slots of a KV block
    part: int  # slots of one softmax update
    heads: int  # KV heads of one matrix product
    scales_queries: bool  # tiles: queries are scaled, their low parts in the idle depth of the matrix unit
    has_sinks: bool
    has_k_scale: bool
    has_v_scale: bool
    return_lse: bool
    table_stride: int  # entries from one row of the block tables to the next
    tables_in_hbm: bool
    max_unrolled: int  # matrix products of a block that are unrolled
    buffers: int  # KV blocks in VMEM: one that is attended, the others under way
    step_items: int | None  # items of a step of the grid; None: it has one step, with all of them

    @property
    def packing(self) -> int:
        """Query rows of one 32-bit word."""
        return packing(jnp.dtype(self.compute_dtype))

    @property
    def padded_group(self) -> int:
        """Query heads per KV head in a tile of several queries: whole words."""
        return -(-self.group // self.packing) * self.packing

    @property
    def num_products(self) -> int:
        """Matrix products that cover all KV heads."""
        return self.num_kv_heads // self.heads

    @property
    def rows(self) -> int:
        """Rows of one matrix product's queries."""
        if self.queries > 1:
            return self.queries * self.padded_group
        return -(-self.heads * self.group // SUBLANES) * SUBLANES

    @property
    def padded_rows(self) -> int:
        """Rows of a tile's product as lanes of whole registers."""
        return -(-self.rows // LANES) * LANES

    @property
    def num_pieces(self) -> int:
        """Pieces of 128 lanes."""
        return self.lanes // LANES

    @property
    def columns(self) -> int:
        """Columns of a product's result."""
        return self.heads * self.lanes

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""
        return self.block // self.page_size


def plan_items(batch: Batch, config: ItemSizes, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """(table int32[fields * (room + 1)], number of items int32[]) of the sequences with queries in `batch`.

    `num_tokens` is the length of the array of queries. The last column is the item that stands for the end.
    """
    mask, queries, block = config.mask, config.queries, config.block
    room = min(num_tokens, num_tokens // queries + batch.seq_lens.shape[0])
    tile, count = query_tiles(batch, mask, room=room, queries=queries, page_size=config.page_size)
    live = tile.last_pos >= 0
    token = jnp.clip(tile.token, 0, num_tokens - queries)
    skip = tile.token - token
    run_start = (tile.first_page - tile.num_sink_pages) * config.page_size  # position of slot 0, sink pages apart
    upper = mask.upper(tile.last_pos, tile.seq_len)
    num_blocks = -(-tile.num_pages * config.page_size // block)
    cut = jnp.maximum(mask.lower(tile.last_pos) - run_start, tile.num_sink_pages * config.page_size)
    num_lead = jnp.clip(-(-cut // block), 0, num_blocks)
    whole = mask.upper(tile.first_pos, tile.seq_len) + 1 - run_start
    num_full = jnp.clip(whole // block - num_lead, 0, num_blocks)
    chunk = mask.attention_chunk_size
    with_blocks = jnp.where(live & (num_blocks > 0), jnp.arange(room, dtype=jnp.int32), room)
    fields = {
        Field.TABLE: tile.seq * config.table_stride,
        Field.TOKEN: token,
        Field.SKIP: skip,
        Field.NUM_QUERIES: tile.last_pos - tile.first_pos + 1,
        Field.POS: tile.first_pos - skip,
        Field.LOWER: mask.lower(tile.first_pos),
        Field.UPPER: upper,
        Field.BORDER: jnp.zeros_like(token) if chunk is None else (tile.first_pos // chunk + 1) * chunk,
        Field.SINK_PAGES: tile.num_sink_pages,
        Field.SHIFT: tile.first_page - tile.num_sink_pages,
        Field.NUM_PAGES: tile.num_pages,
        Field.NUM_BLOCKS: num_blocks,
        Field.NUM_FULL: num_full,
        Field.NUM_LEAD: num_lead,
        Field.STEP: jnp.cumsum(num_blocks) - num_blocks,
        Field.NEXT: jnp.append(lax.cummin(with_blocks, reverse=True)[1:], room),
    }
    table = jnp.stack([jnp.where(live | (field == Field.NEXT), fields[field], 0) for field in Field])
    end = jnp.zeros((len(Field), 1), jnp.int32).at[Field.NEXT].set(room)
    table = jnp.concatenate([table, end], axis=1)
    return table.reshape(-1).astype(jnp.int32), count


def block_slots(
    mask: MaskRule, queries: int, num_columns: int, page_size: int, token_bytes: int, vmem_bytes: int
) -> int:
    """Slots of a KV block: a power of two, at least a page and 128.

    As many as a tile can see, at most 512; fewer if two blocks exceed `vmem_bytes`; for decoding 1,024 where 512 would
    be a small block (few KV heads), so that its fixed costs spread over more bytes.
    """
    most = 512
    if queries == 1 and 1024 * token_bytes <= 2 << 20:
        most = 1024
    while most > LANES and 2 * most * token_bytes > vmem_bytes:
        most //= 2
    return max(LANES, page_size, min(most, seen_slots(mask, queries, num_columns, page_size)))


def ring_buffers(block_bytes: int, vmem_bytes: int) -> int:
    """Buffers of a ring: a power of two from 2 to 8, as many as VMEM has room for, at most as many as are of use.

    HBM answers after about a microsecond, in which it moves 4 MiB. A block's buffer is taken for as long as HBM takes
    to answer, to move the block and then to have it attended, which is no longer than the move where HBM binds: so
    4 MiB beside two blocks keep HBM busy.
    """
    buffers = 2
    while buffers < 8 and 2 * buffers * block_bytes <= vmem_bytes and (buffers - 2) * block_bytes < 4 << 20:
        buffers *= 2
    return buffers


def seen_slots(mask: MaskRule, queries: int, num_columns: int, page_size: int) -> int:
    """Slots that a tile can see at most, rounded up to a power of two: no block need be longer."""
    seen = mask.max_pages(queries, num_columns, page_size) * page_size
    return 1 << (seen - 1).bit_length()

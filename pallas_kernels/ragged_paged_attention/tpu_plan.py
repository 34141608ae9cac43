"""Static sizes of one launch of the TPU kernel.

Flow:    shapes + options -> [TpuConfig]
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.mask import MaskRule
from pallas_kernels.tpu.item_plan import seen_slots
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, packing


@dataclass(frozen=True)
class TpuConfig:
    """Static description of one launch."""

    mask: MaskRule
    sm_scale: float
    soft_cap: float | None
    num_kv_heads: int
    group: int  # query heads per KV head
    lanes: int  # head dimension in whole pieces of 128
    page_size: int
    tokens_per_row: int  # tokens of a page that share a row of words
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
    context_size: int | None  # ranks that share the tokens; None: the pages hold whole sequences

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


def block_slots(
    mask: MaskRule, queries: int, num_columns: int, page_size: int, token_bytes: int, vmem_bytes: int, ranks: int = 1
) -> int:
    """Slots of a KV block: a power of two, at least a page and 128.

    As many as a tile can see, at most 512; fewer if two blocks exceed `vmem_bytes`. Decode takes 1,024 where 512 would
    be a small block (few KV heads), so that fixed costs spread over more bytes. It takes more where a ring of 8 blocks
    would be less than the 4 MiB that HBM moves before it answers.
    """
    most = 512
    if queries == 1 and 1024 * token_bytes <= 2 << 20:
        most = 1024
        while 8 * most * token_bytes < 4 << 20:
            most *= 2
    while most > LANES and 2 * most * token_bytes > vmem_bytes:
        most //= 2
    return max(LANES, page_size, min(most, seen_slots(mask, queries, num_columns, page_size, ranks)))


def ring_buffers(block_bytes: int, vmem_bytes: int) -> int:
    """Buffers of a ring: a power of two from 2 to 8, as many as VMEM has room for, at most as many as are of use.

    HBM answers after about a microsecond, in which it moves 4 MiB. A block's buffer is taken while HBM answers, while
    the block moves, and while it is attended, which takes no longer than the move where HBM binds. So 4 MiB beside two
    blocks keep HBM busy.
    """
    buffers = 2
    while buffers < 8 and 2 * buffers * block_bytes <= vmem_bytes and (buffers - 2) * block_bytes < 4 << 20:
        buffers *= 2
    return buffers

"""KV blocks of the TPU kernel: DMA of their pages into a double buffer, and reading K or V of one head.

Flow:    item table + block tables + pages in HBM -> [KVBlocks.start / wait] -> VMEM -> [KVBlocks.load] -> [n, lanes]

A page is one DMA for each 128 lanes, which lie apart, since strided loads take 128. The buffer has one spare row a
token where a token has an even number of rows, so that the stride of a head's load is odd: with a stride of 8 or 16 the
compiler splits each load.

Tables that fit scalar memory come as scalar prefetch. Larger ones stay in HBM, and the row of the next item is
fetched while the current item computes (`fetch_row`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic import LANES, Copy, Ref, is_interpreted, packing, words
from pallas_kernels.ragged_paged_attention.tpu_plan import Field, TpuConfig

_UNROLLED_PAGES = 4  # DMAs of a trip of the loop that starts them


def buffer_shape(config: TpuConfig, pages: jax.Array) -> tuple[int, ...]:
    """Shape of the double buffer for `pages` [pages, page_size, rows, packing, lanes]."""
    rows, pack, lanes = pages.shape[2:]
    return (2, lanes // LANES, config.block, rows | 1, pack, LANES)


@dataclass(frozen=True)
class KVBlocks:
    """References of one launch."""

    config: TpuConfig
    items: Ref  # SMEM int32[fields * num_items]
    num_items: int  # room of the item table
    tables: Ref  # int32[num_seqs * table_stride], SMEM or HBM
    pages: Ref  # HBM [num_pages, page_size, rows, packing, lanes]
    buffer: Ref  # VMEM, `buffer_shape`
    arrived: Ref  # DMA semaphores, one a buffer
    row: Ref | None  # SMEM int32[2 * table_stride], for tables in HBM
    row_arrived: Ref | None  # DMA semaphore

    def field(self, field: Field, item: jax.Array) -> jax.Array:
        """A scalar of an item."""
        return self.items[field * self.num_items + item]

    def fetch_row(self, item: jax.Array) -> Copy:
        """The copy of an item's table row into scalar memory, to start or to wait for."""
        assert self.row is not None
        stride = self.config.table_stride
        source = self.tables.at[pl.ds(pl.multiple_of(self.field(Field.TABLE, item), stride), stride)]
        target = self.row.at[pl.ds(pl.multiple_of(lax.rem(item, 2) * stride, stride), stride)]
        return pltpu.make_async_copy(source, target, self.row_arrived)

    def block(self, item: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(number of the block, in order of positions, that step `step` of an item attends, its pages)."""
        full, lead = self.field(Field.NUM_FULL, item), self.field(Field.NUM_LEAD, item)
        block = jnp.where(step < full, step + lead, jnp.where(step < full + lead, step - full, step))
        left = self.field(Field.NUM_PAGES, item) - block * self.config.block_pages
        return block, jnp.minimum(left, self.config.block_pages)

    def start(self, item: jax.Array, block: jax.Array, num_pages: jax.Array, slot: jax.Array) -> None:
        """Starts the DMAs of the pages of any block of an item."""
        first = block * self.config.block_pages
        base = self._table_start(item)
        entry, num_sink_pages = base + first + self.field(Field.SHIFT, item), self.field(Field.SINK_PAGES, item) - first

        def page(j: jax.Array) -> None:
            at = entry + j
            if self.config.mask.num_sink_tokens:
                at = jnp.where(j < num_sink_pages, base + first + j, at)
            self._start_page(at, j, slot)

        def some(i: jax.Array, carry: None) -> None:
            for j in range(_UNROLLED_PAGES):
                page(i * _UNROLLED_PAGES + j)
            return carry

        def one(j: jax.Array, carry: None) -> None:
            page(j)
            return carry

        num_groups = num_pages // _UNROLLED_PAGES
        lax.fori_loop(0, num_groups, some, None)
        lax.fori_loop(num_groups * _UNROLLED_PAGES, num_pages, one, None)

    def wait(self, num_pages: jax.Array | int, slot: jax.Array) -> None:
        """Waits for the first pages of a block."""
        for piece in range(self.config.num_pieces):
            window = self._window(slot, piece, 0, num_pages)
            pltpu.make_async_copy(window, window, self.arrived.at[slot]).wait()  # for as many bytes as it has

    def full_entries(self, item: jax.Array) -> jax.Array:
        """Table entry of the first page of step 0, if that is a full block."""
        first = self.field(Field.NUM_LEAD, item) * self.config.block_pages
        return self._table_start(item) + self.field(Field.SHIFT, item) + first

    def start_full(self, entry: jax.Array, slot: jax.Array) -> None:
        """Starts the DMAs of a whole block of the contiguous run, from its first table entry on."""
        for j in range(self.config.block_pages):
            self._start_page(entry + j, j, slot)

    def load(
        self, slot: jax.Array, base: jax.Array | int, offset: int, value: int, first: int, count: int
    ) -> jax.Array:
        """K (`value` 0) or V (1) of head `base + offset`, [count, lanes] in the compute dtype.

        `base`, which may be traced, is a multiple of the heads that share a word.
        """
        dtype, compute_dtype = self.buffer.dtype, self.config.compute_dtype
        pack = packing(dtype)
        row, place = base * 2 // pack + (2 * offset + value) // pack, (2 * offset + value) % pack
        pieces = []
        for piece in range(self.config.num_pieces):
            if is_interpreted():
                pieces.append(self.buffer[slot, piece, pl.ds(first, count), row, place].astype(compute_dtype))
                continue
            stride = self.buffer.shape[3]
            word = words(self.buffer, slot, piece)[pl.ds(first * stride + row, count, stride=stride), :]
            pieces.append(_element(word, place, dtype).astype(compute_dtype))
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)

    def _table_start(self, item: jax.Array) -> jax.Array:
        if self.config.tables_in_hbm:
            return lax.rem(item, 2) * self.config.table_stride
        return self.field(Field.TABLE, item)

    def _window(self, slot: jax.Array, piece: int, page: jax.Array | int, count: jax.Array | int) -> Ref:
        """The part of the buffer that one piece of the lanes of `count` pages of a block fills."""
        size = self.config.page_size
        return self.buffer.at[slot, piece, pl.ds(page * size, count * size), pl.ds(0, self.pages.shape[2])]

    def _start_page(self, entry: jax.Array, j: jax.Array | int, slot: jax.Array) -> None:
        for piece in range(self.config.num_pieces):
            self._copy(entry, j, slot, piece).start()

    def _copy(self, entry: jax.Array, j: jax.Array | int, slot: jax.Array, piece: int) -> Copy:
        table = self.tables if self.row is None else self.row
        source = self.pages.at[table[entry]]
        if self.config.num_pieces > 1:
            source = source.at[:, :, :, pl.ds(piece * LANES, LANES)]
        return pltpu.make_async_copy(source, self._window(slot, piece, j, 1), self.arrived.at[slot])


def _element(word: jax.Array, place: int, dtype: jnp.dtype) -> jax.Array:
    """Element `place` of each 32-bit word, in `dtype`."""
    bits = 8 * jnp.dtype(dtype).itemsize
    if bits == 32:
        return pltpu.bitcast(word, dtype)
    unsigned = jnp.uint16 if bits == 16 else jnp.uint8
    return pltpu.bitcast((word >> (bits * place)).astype(unsigned), dtype)

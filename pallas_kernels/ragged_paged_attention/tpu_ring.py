"""Ring of KV buffers of the TPU kernel: blocks of all items in their order, each fetched long before it is attended.

Flow:    item table -> [BlockRing.fill / start_next] -> DMAs of pages -> KVBlocks, whose blocks `_kernel` attends

The `i`-th block of a launch, items one after the other, lies in buffer `i % buffers`. A block that has been attended
frees its buffer for the block `buffers` later, be that one of the same item or of a following one. A cursor in scalar
memory, kept from step to step of the grid, says which block that is. Items of no blocks are passed over.

Block tables in HBM: rows of items with blocks take turns in a ring of their own; a row is free once the cursor has left
its item.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks
from pallas_kernels.ragged_paged_attention.tpu_plan import TpuConfig
from pallas_kernels.tpu.item_plan import Field
from pallas_kernels.tpu.items import ItemTable
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Ref


class Cursor(enum.IntEnum):
    """Scalars of the cursor."""

    ITEM = 0  # item of the block that is fetched next, or the one before it, if `STEP` is past its end
    STEP = 1  # its step
    ROW = 2  # place of its block table in the ring of rows
    ROW_ITEM = 3  # item whose block table is fetched next


@dataclass(frozen=True)
class BlockRing:
    """References of one launch."""

    config: TpuConfig
    kv: KVBlocks
    cursor: Ref  # SMEM int32[len(Cursor)]

    @property
    def items(self) -> ItemTable:
        """Whose blocks these are."""
        return self.kv.items

    def slot(self, number: jax.Array) -> jax.Array:
        """Buffer of the `number`-th block."""
        return _modulo(number, self.config.buffers)

    def rewind(self) -> None:
        """Puts the cursor before the first block."""
        first = jnp.where(self.items.field(Field.NUM_BLOCKS, 0) > 0, 0, self.items.field(Field.NEXT, 0))
        for place, value in ((Cursor.ITEM, first), (Cursor.STEP, 0), (Cursor.ROW, 0), (Cursor.ROW_ITEM, first)):
            self.cursor[place] = jnp.int32(value)
        if self.config.tables_in_hbm:
            lax.fori_loop(0, self.items.num_rows, lambda place, _: self._start_row(place), None)
            pl.when(first < self._end)(lambda: self.items.fetch_row(first, jnp.int32(0)).wait())

    def fill_before(self, written: Ref) -> jax.Array:
        """Starts the first blocks until all buffers are filled or one has a page of `written`; how many."""
        # The cursor is the loop's state: the condition reads it, the body moves it.
        return lax.while_loop(
            lambda slot: (slot < self.config.buffers) & ~self._next_has_any(written),
            lambda slot: self._start_into(slot) + 1,
            jnp.int32(0),
        )

    def fill(self, first: jax.Array | int = 0) -> None:
        """Starts blocks into the buffers from `first` on."""
        lax.fori_loop(first, self.config.buffers, lambda slot, _: self.start_next(slot), None)

    def start_next(self, slot: jax.Array) -> None:
        """Starts the next block, if there is one, into a buffer that is free."""
        before, (item, step, leaves) = self.cursor[Cursor.ITEM], self._next()
        self.cursor[Cursor.ITEM], self.cursor[Cursor.STEP] = item, step + 1
        if self.config.tables_in_hbm:
            pl.when(leaves & (before < self._end))(lambda: self._next_row(item))
        self.kv.start(item, *self.items.block(item, step), slot, self._table_start(item))

    def full_entries(self, item: jax.Array) -> jax.Array:
        """Table entry of the first page of step 0 of the cursor's item, if that is a full block."""
        return self.items.full_entries(item, self._table_start(item))

    def skip(self, num_steps: jax.Array) -> None:
        """Moves the cursor over steps of its item whose blocks have been started otherwise."""
        self.cursor[Cursor.STEP] = self.cursor[Cursor.STEP] + num_steps

    def _start_into(self, slot: jax.Array) -> jax.Array:
        self.start_next(slot)
        return slot

    def _next(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Item and step of the next block, and whether it is another item's than the one before."""
        before, step = self.cursor[Cursor.ITEM], self.cursor[Cursor.STEP]
        leaves = step >= self.items.field(Field.NUM_BLOCKS, before)
        item = jnp.where(leaves, self.items.field(Field.NEXT, before), before)
        return item, jnp.where(leaves, 0, step), leaves

    def _next_has_any(self, pages: Ref) -> jax.Array:
        """Whether the next block has one of `pages` int32[n, 128]; also where its block table has yet to arrive."""
        item, step, leaves = self._next()
        block, num_pages = self.items.block(item, step)
        entry = self.items.page_entries(item, block, self._table_start(item))
        if self.config.tables_in_hbm:
            num_pages = jnp.where(leaves, 0, num_pages)

        def compare(j: jax.Array, found: jax.Array) -> jax.Array:
            page = self.items.entries[entry(j)]
            for first in range(0, pages.shape[0], SUBLANES):
                found = jnp.where(pages[pl.ds(first, SUBLANES)] == page, 1.0, found)
            return found

        found = jnp.max(lax.fori_loop(0, num_pages, compare, jnp.zeros((SUBLANES, LANES), jnp.float32))) > 0
        return found | leaves if self.config.tables_in_hbm else found

    @property
    def _end(self) -> int:
        """The item that stands for the end."""
        return self.items.room - 1

    def _table_start(self, item: jax.Array) -> jax.Array:
        if self.config.tables_in_hbm:
            return self.cursor[Cursor.ROW] * self.config.table_stride
        return self.items.table_start(item)

    def _start_row(self, place: jax.Array) -> None:
        item = self.cursor[Cursor.ROW_ITEM]
        pl.when(item < self._end)(lambda: self.items.fetch_row(item, place).start())
        self.cursor[Cursor.ROW_ITEM] = self.items.field(Field.NEXT, item)

    def _next_row(self, item: jax.Array) -> None:
        """Makes the next row that of `item`, to which the cursor moves."""
        left = self.cursor[Cursor.ROW]
        place = _modulo(left + 1, self.items.num_rows)
        self.cursor[Cursor.ROW] = place
        self._start_row(left)
        pl.when(item < self._end)(lambda: self.items.fetch_row(item, place).wait())


def _modulo(number: jax.Array, size: int) -> jax.Array:
    return number & (size - 1) if size & (size - 1) == 0 else lax.rem(number, jnp.int32(size))

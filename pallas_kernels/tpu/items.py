"""Scalars of the work items of a TPU kernel, and the pages that their block tables name.

Flow:    item table + block tables -> [ItemTable] -> scalars of an item, table entries of the pages of its blocks

Tables that fit scalar memory come as scalar prefetch. Larger ones stay in HBM, and the rows of the next items are
fetched while the current ones compute (`fetch_row`), into a ring of `num_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.key_share import KeyShare
from pallas_kernels.tpu.item_plan import Field, ItemSizes
from pallas_kernels.tpu.mosaic import Copy, Ref

_UNROLLED_PAGES = 4  # DMAs of a trip of the loop that starts them

# (table entry, number of the page in its block) -> starts the page's DMA.
StartPage = Callable[[jax.Array, jax.Array | int], None]


@dataclass(frozen=True)
class ItemTable:
    """References of one launch."""

    sizes: ItemSizes
    fields: Ref  # SMEM int32[fields * room]
    room: int  # for items
    tables: Ref  # int32[num_seqs * table_stride], SMEM or HBM
    row: Ref | None = None  # SMEM int32[num_rows * table_stride], for tables in HBM
    row_arrived: Ref | None = None  # DMA semaphore, or one a row
    num_rows: int = 2

    @property
    def entries(self) -> Ref:
        """Where `table_start` counts: int32 page ids in scalar memory."""
        return self.tables if self.row is None else self.row

    def field(self, field: Field, item: jax.Array | int) -> jax.Array:
        """A scalar of an item."""
        return self.fields[field * self.room + item]

    def share(self, item: jax.Array) -> KeyShare | None:
        """Which tokens the pages hold, where ranks of context parallelism share them."""
        size = self.sizes.context_size
        return None if size is None else KeyShare(self.field(Field.RANK, item), size)

    def fetch_row(self, item: jax.Array, place: jax.Array | None = None) -> Copy:
        """The copy of an item's table row into scalar memory, to start or to wait for.

        `place`: which row of the ring, which then has a semaphore for each; None: by the item's number.
        """
        assert self.row is not None
        assert self.row_arrived is not None
        stride = self.sizes.table_stride
        source = self.tables.at[pl.ds(pl.multiple_of(self.field(Field.TABLE, item), stride), stride)]
        start = self.table_start(item) if place is None else place * stride
        target = self.row.at[pl.ds(pl.multiple_of(start, stride), stride)]
        return pltpu.make_async_copy(source, target, self.row_arrived if place is None else self.row_arrived.at[place])

    def table_start(self, item: jax.Array) -> jax.Array:
        """Entry of the first column of an item's block table."""
        if self.sizes.tables_in_hbm:
            return lax.rem(item, self.num_rows) * self.sizes.table_stride
        return self.field(Field.TABLE, item)

    def block(self, item: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(number of the block, in order of positions, that step `step` of an item attends, its pages)."""
        full, lead = self.field(Field.NUM_FULL, item), self.field(Field.NUM_LEAD, item)
        block = jnp.where(step < full, step + lead, jnp.where(step < full + lead, step - full, step))
        left = self.field(Field.NUM_PAGES, item) - block * self.sizes.block_pages
        return block, jnp.minimum(left, self.sizes.block_pages)

    def full_entries(self, item: jax.Array, base: jax.Array | None = None) -> jax.Array:
        """Table entry of the first page of step 0, if that is a full block; `base`: of its table, as in `start`."""
        first = self.field(Field.NUM_LEAD, item) * self.sizes.block_pages
        return (self.table_start(item) if base is None else base) + self.field(Field.SHIFT, item) + first

    def page_entries(
        self, item: jax.Array, block: jax.Array, base: jax.Array | None = None
    ) -> Callable[[jax.Array], jax.Array]:
        """Number of a page in a block of an item -> its table entry; `base`: of its table, as in `start`."""
        first = block * self.sizes.block_pages
        base = self.table_start(item) if base is None else base
        entry, num_sink_pages = base + first + self.field(Field.SHIFT, item), self.field(Field.SINK_PAGES, item) - first

        def entry_of(j: jax.Array) -> jax.Array:
            at = entry + j
            if self.sizes.mask.has_sink_tokens:
                at = jnp.where(j < num_sink_pages, base + first + j, at)
            return at

        return entry_of

    def start(
        self,
        item: jax.Array,
        block: jax.Array,
        num_pages: jax.Array,
        start_page: StartPage,
        base: jax.Array | None = None,  # first entry of its block table; None: `table_start`
    ) -> None:
        """Starts the pages of any block of an item."""
        entry = self.page_entries(item, block, base)

        def page(j: jax.Array) -> None:
            start_page(entry(j), j)

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

    def start_full(self, entry: jax.Array, start_page: StartPage) -> None:
        """Starts the pages of a whole block of the contiguous run, from its first table entry on."""
        for j in range(self.sizes.block_pages):
            start_page(entry + j, j)

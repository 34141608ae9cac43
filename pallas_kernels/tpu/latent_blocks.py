"""Blocks of latent states in a TPU kernel: DMA of their pages into a ring of buffers, along the items of a launch.

Flow:    run of states of an item + pages in HBM -> [StateBlocks.walk] -> rows of a block in VMEM -> the kernel's body

A step of the grid works on the item before its own. Before it attends a block it starts the one `buffers - 1` later, of
the same item or of the step's own, so that so many are always under way. A page is one DMA. The state at `place` of row
r of a block is number `r * places + place` from its first.

Queries, states of passes and results go by the grid's pipeline, so a block belongs to its item's step. Kernels that
move these themselves let blocks run across items: in a ring (`ragged_paged_attention.tpu_ring`), or several to a step
(`mla_paged_attention.tpu_latents`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.entries import EntryReader
from pallas_kernels.tpu.mosaic import Copy, Ref
from pallas_kernels.tpu.slab_refs import named_page


@dataclass(frozen=True)
class StatePages:
    """Pages of one cache."""

    reader: EntryReader
    page_size: int  # states, a power of two
    rows: int  # of a page

    @property
    def places(self) -> int:
        """States of a row that are used."""
        return min(self.reader.packing, self.page_size)


@dataclass(frozen=True)
class Run:
    """States that an item sees; scalars in a kernel."""

    lower: Any  # first state
    upper: Any  # last state, -1: none
    page_size: int
    page: Callable[[jax.Array], jax.Array]  # name of the run's j-th page, of `page_names`

    @property
    def first_page(self) -> Any:
        """The first page of the sequence."""
        return self.lower >> log2(self.page_size)

    @property
    def num_pages(self) -> Any:
        """Pages that hold its states."""
        return jnp.where(self.upper < 0, 0, (self.upper >> log2(self.page_size)) - self.first_page + 1)


@dataclass(frozen=True)
class StateBlocks:
    """References of one launch, and its sizes."""

    cache: StatePages
    block_pages: int  # a power of two
    pages: Ref  # HBM [pages, rows, pieces, packing, 128]
    buffer: Ref  # VMEM [buffers, rows of a block, pieces, packing, 128], a power of two of them
    arrived: Ref  # DMA semaphores, one a buffer
    num_before: Ref  # SMEM int32[1] blocks of all items before: they tell the buffer of the next

    @property
    def num_rows(self) -> int:
        """Rows of a block."""
        return self.buffer.shape[1]

    @property
    def num_ahead(self) -> int:
        """Blocks under way beside the one that is attended."""
        return self.buffer.shape[0] - 1

    def begin(self, run: Callable[[], Run], has_items: Any) -> None:
        """In the first step: starts the first blocks of the first item, if there is one."""
        self.num_before[0] = 0

        @pl.when(has_items)
        def _() -> None:
            lax.fori_loop(0, self.num_ahead, lambda j, _: self._start(run(), j, j), None)

    def first_state(self, run: Run, block: jax.Array) -> jax.Array:
        """Number, in its sequence, of the first state of a block."""
        return (run.first_page + block * self.block_pages) * self.cache.page_size

    def walk(
        self, run: Run, next_run: Callable[[], Run], has_next: jax.Array, body: Callable[[jax.Array, jax.Array], None]
    ) -> jax.Array:
        """`body(block, slot of the buffer)` for the blocks of an item; then the next item's first are under way.

        Gives back the number of blocks.
        """
        before, num_ahead = self.num_before[0], self.num_ahead
        num_blocks = (run.num_pages + self.block_pages - 1) >> log2(self.block_pages)

        def start(block: jax.Array, carry: None) -> None:
            slot = (before + block) & num_ahead
            pl.when(block < num_blocks)(lambda: self._start(run, block, slot))
            pl.when((block >= num_blocks) & has_next)(lambda: self._start(next_run(), block - num_blocks, slot))
            return carry

        def one(block: jax.Array, carry: None) -> None:
            slot = (before + block) & num_ahead
            start(block + num_ahead, None)
            window = self._window(slot, 0, self._pages_of_block(run, block))
            pltpu.make_async_copy(window, window, self.arrived.at[slot]).wait()  # for as many bytes as it has
            body(block, slot)
            return carry

        lax.fori_loop(jnp.minimum(num_blocks, num_ahead), num_ahead, start, None)  # the item's own are under way
        lax.fori_loop(0, num_blocks, one, None)
        self.num_before[0] = before + num_blocks
        return num_blocks

    def _pages_of_block(self, run: Run, block: jax.Array | int) -> jax.Array:
        return jnp.minimum(run.num_pages - block * self.block_pages, self.block_pages)

    def _start(self, run: Run, block: jax.Array | int, slot: jax.Array) -> None:
        """Starts a block of an item, if it has so many."""
        first = block * self.block_pages

        def page(j: jax.Array, carry: None) -> None:
            self._copy(run.page(first + j), j, slot).start()
            return carry

        lax.fori_loop(0, self._pages_of_block(run, block), page, None)

    def _copy(self, page: jax.Array, j: jax.Array, slot: jax.Array) -> Copy:
        return pltpu.make_async_copy(named_page(self.pages, page), self._target(j, slot), self.arrived.at[slot])

    def _target(self, j: jax.Array, slot: jax.Array) -> Ref:
        return self._window(slot, j, 1)

    def _window(self, slot: jax.Array, page: jax.Array | int, count: jax.Array | int) -> Ref:
        size = self.cache.rows
        return self.buffer.at[slot, pl.ds(page * size, count * size)]


def log2(power_of_two: int) -> int:
    """The exponent of a power of two."""
    return power_of_two.bit_length() - 1

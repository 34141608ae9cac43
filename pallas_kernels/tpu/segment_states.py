"""The state of one sequence after the other, from its page and to its page, for kernels that walk over segments.

Flow:    page -> coming (DMA) -> the kernel's carry, from segment to segment -> going -> page (DMA)

A page is loaded while the segment before is computed: nothing reads `coming` after a segment has begun. It is stored
while the segments up to the next store are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.mosaic import Copy, Ref
from pallas_kernels.tpu.segments import Field
from pallas_kernels.tpu.slab_refs import seen_shape


class PageBuffers(NamedTuple):
    """Scratch through which states go: its shapes in a call, its references in a kernel."""

    coming: Ref  # one state, as its page has it
    going: Ref
    arrived: Ref  # semaphores
    left: Ref
    stored: Ref  # int32[1] in SMEM: page whose store has not been waited for, 0: none

    @classmethod
    def of(cls, states: jax.Array) -> PageBuffers:
        """For states [pages, ...]."""
        page = pltpu.VMEM(seen_shape(states)[1:], states.dtype)
        return cls(page, page, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA, pltpu.SMEM((1,), jnp.int32))


@dataclass(frozen=True)
class CarriedState:
    """Moves states and reads the table; `segment` is the one that runs, of `num_segments`."""

    table: Ref  # of the segments, in SMEM
    room: int
    states: Ref  # in HBM
    buffers: PageBuffers
    segment: jax.Array
    num_segments: jax.Array | int

    @classmethod
    def of_grid(cls, table: Ref, room: int, states: Ref, buffers: PageBuffers) -> CarriedState:
        """In a grid of one step per segment."""
        return cls(table, room, states, buffers, pl.program_id(0), pl.num_programs(0))

    def field(self, field: Field) -> jax.Array:
        """A scalar of the segment."""
        return self._field(field, self.segment)

    @property
    def begins_chunk(self) -> jax.Array:
        """Whether it is the first segment of its chunk."""
        before = self._field(Field.CHUNK, jnp.maximum(self.segment - 1, 0))
        return (self.segment == 0) | (self.field(Field.CHUNK) != before)

    def begin(self, take: Callable[[], None], clear: Callable[[], None]) -> None:
        """Where the sequence begins: `take` its state out of `coming`, or `clear`; then loads the next one's."""
        page = self.field(Field.READ)

        @pl.when(self.segment == 0)
        def _() -> None:
            self.buffers.stored[0] = 0
            self._start_load(self.segment)

        @pl.when(page > 0)
        def _() -> None:
            self._loading(page).wait()
            take()

        pl.when((self.field(Field.BEGINS) == 1) & (page == 0))(clear)
        pl.when(self.segment + 1 < self.num_segments)(lambda: self._start_load(self.segment + 1))

    def end(self, give: Callable[[], None]) -> None:
        """Where the sequence ends and has a page: `give` its state to `going`, and the store starts."""
        page = self.field(Field.WRITE)
        pl.when(page > 0)(lambda: self._store(page, give))
        pl.when(self.segment + 1 == self.num_segments)(self._wait_for_store)

    def each(self, compute: Callable[[bool], None], peeks: bool) -> None:
        """`compute(False)`, or of a segment that peeks `compute(True)`, which leaves its state in `going` alone."""
        if not peeks:
            return compute(False)
        page = self.field(Field.WRITE)
        pl.when(page < 0)(lambda: self._store(-page, lambda: compute(True)))
        return pl.when(page >= 0)(lambda: compute(False))

    def _store(self, page: jax.Array, give: Callable[[], None]) -> None:
        self._wait_for_store()
        give()
        self._storing(page).start()
        self.buffers.stored[0] = page

    def _field(self, field: Field, segment: jax.Array) -> jax.Array:
        return self.table[field * self.room + segment]

    def _start_load(self, segment: jax.Array) -> None:
        page = self._field(Field.READ, segment)
        pl.when(page > 0)(lambda: self._loading(page).start())

    def _wait_for_store(self) -> None:
        page = self.buffers.stored[0]

        @pl.when(page > 0)
        def _() -> None:
            self._storing(page).wait()
            self.buffers.stored[0] = 0

    def _loading(self, page: jax.Array) -> Copy:
        return pltpu.make_async_copy(self.states.at[page], self.buffers.coming, self.buffers.arrived)

    def _storing(self, page: jax.Array) -> Copy:
        return pltpu.make_async_copy(self.buffers.going, self.states.at[page], self.buffers.left)


@dataclass(frozen=True)
class WholeState:
    """A state that is carried in float32 as it lies in its page; `moves` moves it."""

    moves: CarriedState
    carry: Ref  # float32, of a state's shape

    def begin(self) -> None:
        """Where the sequence begins: its state is in `carry`."""
        self.moves.begin(self._take, self._clear)

    def end(self) -> None:
        """Where the sequence ends: what is in `carry` goes to its page."""
        self.moves.end(self._give)

    def _take(self) -> None:
        self.carry[...] = self.moves.buffers.coming[...].astype(jnp.float32)

    def _clear(self) -> None:
        self.carry[...] = jnp.zeros_like(self.carry)

    def _give(self) -> None:
        going = self.moves.buffers.going
        going[...] = self.carry[...].astype(going.dtype)

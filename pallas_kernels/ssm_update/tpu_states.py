"""The state of one sequence after the other, from its page and to its page, for kernels that walk over segments.

Flow:    page -> coming (DMA) -> the kernel's carry, from segment to segment -> going -> page (DMA)

A page is loaded while the segment before is computed: nothing reads `coming` after a segment has begun. It is stored
while the segments up to the next store are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic import Copy, Ref
from pallas_kernels.ssm_update.tpu_plan import Field


@dataclass(frozen=True)
class CarriedState:
    """Moves states and reads the table; `segment` is the one that runs, of `num_segments`."""

    table: Ref  # of the segments, in SMEM
    room: int
    states: Ref  # in HBM
    coming: Ref  # one state
    going: Ref
    arrived: Ref  # semaphores
    left: Ref
    stored: Ref  # int32[1] in SMEM: page whose store has not been waited for, 0: none
    segment: jax.Array
    num_segments: jax.Array | int

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
            self.stored[0] = 0
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

        @pl.when(page > 0)
        def _() -> None:
            self._wait_for_store()
            give()
            self._storing(page).start()
            self.stored[0] = page

        pl.when(self.segment + 1 == self.num_segments)(self._wait_for_store)

    def _field(self, field: Field, segment: jax.Array) -> jax.Array:
        return self.table[field * self.room + segment]

    def _start_load(self, segment: jax.Array) -> None:
        page = self._field(Field.READ, segment)
        pl.when(page > 0)(lambda: self._loading(page).start())

    def _wait_for_store(self) -> None:
        page = self.stored[0]

        @pl.when(page > 0)
        def _() -> None:
            self._storing(page).wait()
            self.stored[0] = 0

    def _loading(self, page: jax.Array) -> Copy:
        return pltpu.make_async_copy(self.states.at[page], self.coming, self.arrived)

    def _storing(self, page: jax.Array) -> Copy:
        return pltpu.make_async_copy(self.going, self.states.at[page], self.left)


@dataclass(frozen=True)
class WholeState:
    """A state that is carried in float32 as it lies in its page; `moves` moves it."""

    moves: CarriedState
    carry: Ref

    @staticmethod
    def scratch(states: jax.Array) -> dict[str, Any]:
        """Scratch of a kernel over `states` [pages, ...], by names that `of` knows."""
        state = states.shape[1:]
        return {
            "carry": pltpu.VMEM(state, jnp.float32),
            "coming": pltpu.VMEM(state, states.dtype),
            "going": pltpu.VMEM(state, states.dtype),
            "arrived": pltpu.SemaphoreType.DMA,
            "left": pltpu.SemaphoreType.DMA,
            "stored": pltpu.SMEM((1,), jnp.int32),
        }

    @classmethod
    def of(cls, table: Ref, room: int, states: Ref, refs: Mapping[str, Ref]) -> WholeState:
        """In a grid of one step per segment; `refs` are those of `scratch`, and maybe others."""
        names = ("coming", "going", "arrived", "left", "stored")
        own = {name: refs[name] for name in names}
        here, count = pl.program_id(0), pl.num_programs(0)
        moves = CarriedState(table, room, states, segment=here, num_segments=count, **own)
        return cls(moves, refs["carry"])

    def begin(self) -> None:
        """Where the sequence begins: its state is in `carry`."""
        self.moves.begin(self._take, self._clear)

    def end(self) -> None:
        """Where the sequence ends: what is in `carry` goes to its page."""
        self.moves.end(self._give)

    def _take(self) -> None:
        self.carry[...] = self.moves.coming[...].astype(jnp.float32)

    def _clear(self) -> None:
        self.carry[...] = jnp.zeros_like(self.carry)

    def _give(self) -> None:
        self.moves.going[...] = self.carry[...].astype(self.moves.going.dtype)

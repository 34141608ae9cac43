"""What moves between HBM and VMEM in a launch of ring_delta_rule for TPU: states, held slots, new entries.

Flow:    pages in HBM -> [Moves.load] -> a sequence's buffers -> its step -> [Moves.store_state, Moves.store_entries]

Step i of the grid is sequence i. Its state lies in buffer i % 3: it comes during step i - 1, is moved on there where it
is written, and leaves during steps i and i + 1, before the buffer is used again. Rings have two buffers, and so do
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.mosaic import Copy, Ref

STATES = 3  # buffers of states: one that comes, one that is computed, one that leaves
RINGS = 2  # of rings, and of entries


class Field(IntEnum):
    """Rows of the table: what a sequence does, as `RingStep` has it."""

    READ = 0
    HELD = 1
    STATE_PAGE = 2
    RING_PAGE = 3
    FIRST_SLOT = 4
    NUM_NEW = 5


class Buffers(NamedTuple):
    """Of the arrays of a ring, whose slots are the second axis."""

    keys: Any  # [2, slots, G, K]
    deltas: Any  # [2, slots, H, V]
    decays: Any  # [2, slots, H, K]; None: a decay per head, which is moved elsewhere


class Semaphores(NamedTuple):
    """Of the buffers."""

    states_came: Ref  # [3]
    states_left: Ref  # [3]
    rings_came: Ref  # [2]
    entries_left: Ref  # [2]

    @classmethod
    def scratch(cls) -> Semaphores:
        """As a call takes them."""
        return cls(*(pltpu.SemaphoreType.DMA((n,)) for n in (STATES, STATES, RINGS, RINGS)))


@dataclass(frozen=True)
class Moves:
    """Starts copies and waits for them."""

    table: Ref  # SMEM int32[fields * rows]
    rows: int
    states: Ref  # HBM [pages, H, K, V]
    ring: Sequence[Ref]  # HBM
    base: Ref  # [3, H, K, V]
    held: Buffers  # of R slots
    new: Buffers  # of `most` slots
    semaphores: Semaphores

    def field(self, field: Field, step: jax.Array) -> jax.Array:
        """A scalar of a sequence."""
        return self.table[field * self.rows + step]

    def load(self, step: jax.Array) -> None:
        """Starts what a sequence reads: its buffers are free."""
        self._state(self.field(Field.READ, step), step, comes=True).start()
        self._each_held(step, lambda copy: copy.start())

    def wait_for_load(self, step: jax.Array) -> None:
        """Waits for it."""
        self._state(self.field(Field.READ, step), step, comes=True).wait()
        self._each_held(step, lambda copy: copy.wait())

    def store_state(self, step: jax.Array) -> None:
        """Starts the store of a state out of its buffer, where the sequence writes one."""
        page = self.field(Field.STATE_PAGE, step)
        pl.when(page > 0)(lambda: self._state(page, step, comes=False).start())

    def wait_for_state(self, step: jax.Array) -> None:
        """Waits for it."""
        page = self.field(Field.STATE_PAGE, step)
        pl.when(page > 0)(lambda: self._state(page, step, comes=False).wait())

    def store_entries(self, step: jax.Array) -> None:
        """Starts the store of a sequence's entries."""
        self._each_entry(step, lambda copy: copy.start())

    def wait_for_entries(self, step: jax.Array) -> None:
        """Waits for it."""
        self._each_entry(step, lambda copy: copy.wait())

    def _state(self, page: jax.Array, step: jax.Array, *, comes: bool) -> Copy:
        slot, s = lax.rem(step, STATES), self.semaphores
        if comes:
            return pltpu.make_async_copy(self.states.at[page], self.base.at[slot], s.states_came.at[slot])
        return pltpu.make_async_copy(self.base.at[slot], self.states.at[page], s.states_left.at[slot])

    def _each_held(self, step: jax.Array, does: Callable[[Copy], None]) -> None:
        """Of the held slots, where there are any."""
        count, page, slot = self.field(Field.HELD, step), self.field(Field.READ, step), step & 1
        came = self.semaphores.rings_came.at[slot]

        @pl.when(count > 0)
        def _() -> None:
            for pages, buffer in self._arrays(self.held):
                slots = pl.ds(0, count)
                does(pltpu.make_async_copy(pages.at[page, slots], buffer.at[slot, slots], came))

    def _each_entry(self, step: jax.Array, does: Callable[[Copy], None]) -> None:
        """Of the new tokens, where there are any and they have a page."""
        count, page, slot = self.field(Field.NUM_NEW, step), self.field(Field.RING_PAGE, step), step & 1
        first, left = self.field(Field.FIRST_SLOT, step), self.semaphores.entries_left.at[slot]

        @pl.when(page > 0)
        def _() -> None:
            for pages, buffer in self._arrays(self.new):
                target = pages.at[page, pl.ds(first, count)]
                does(pltpu.make_async_copy(buffer.at[slot, pl.ds(0, count)], target, left))

    def _arrays(self, buffers: Buffers) -> list[tuple[Ref, Ref]]:
        """Those of the ring that are moved here, each with its buffer."""
        return [(x, y) for x, y in zip(self.ring, buffers, strict=True) if y is not None]

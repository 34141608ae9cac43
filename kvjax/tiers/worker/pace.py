"""When a worker counts what travels as there: at once in one process, at agreed steps in several.

Flow:    TierWorker, what travels -> [Pace] -> TierWorker, what it reports and which pages it writes
Source:  `kvjax.tiers.processes.common_pace` for several processes

A turn is one look of the worker at what travels: one `get_finished`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvjax.tiers.units import UnitKey

Columns: TypeAlias = tuple[tuple[Any, ...], ...]  # jax.Arrays that are written to pages of one pool


class PieceState(enum.Enum):
    """How far a piece of a load is."""

    ON_ITS_WAY = "on its way"
    THERE = "there"  # on the devices
    FAILED = "failed"
    LATE = "late"  # its load is given up; a thread is still at it


class Pace(Protocol):
    """One worker's. Owned by the engine's thread, but for `check_readable` and `lose`, which threads call."""

    def begin_turn(self) -> int:
        """The number of the turn that begins."""

    def has_arrived(self, turn: int, *, is_ready: bool) -> bool:
        """Whether pages that were gathered in `turn` may go to the host's slots."""

    def has_ended(self, turn: int, *, is_done: bool) -> bool:
        """Whether a write to the host's slots that began in `turn` counts as over; it is waited for then."""

    def end_store(
        self, keys: Sequence[UnitKey], slots: np.ndarray, is_good: np.ndarray, *, on_probation: bool = False
    ) -> np.ndarray:  # bool[n]
        """Which units count as stored, of those of one write."""

    def watch(self, values: Future[Columns], disk_keys: Sequence[UnitKey]) -> int:
        """A piece of a load is on its way, `disk_keys` of it from disk; its number."""

    def state_of(self, number: int, values: Future[Columns]) -> PieceState:
        """How far a piece counts as; what is `THERE` or `FAILED` is asked for once."""

    def check_readable(self, keys: Sequence[UnitKey]) -> None:
        """Raises TierDataError where a unit's slot holds something else."""

    def lose(self, keys: Sequence[UnitKey]) -> None:
        """Units that were to go to disk did not."""

    def reset(self) -> None:
        """Nothing travels any more."""


class OwnPace:
    """The pace of one process: what is there counts."""

    def begin_turn(self) -> int:
        """As `Pace.begin_turn`; nobody counts turns."""
        return 0

    def has_arrived(self, turn: int, *, is_ready: bool) -> bool:
        """As `Pace.has_arrived`."""
        return is_ready

    def has_ended(self, turn: int, *, is_done: bool) -> bool:
        """As `Pace.has_ended`."""
        return is_done

    def end_store(
        self, keys: Sequence[UnitKey], slots: np.ndarray, is_good: np.ndarray, *, on_probation: bool = False
    ) -> np.ndarray:
        """As `Pace.end_store`."""
        return is_good

    def watch(self, values: Future[Columns], disk_keys: Sequence[UnitKey]) -> int:
        """As `Pace.watch`; `state_of` looks at the piece itself."""
        return 0

    def state_of(self, number: int, values: Future[Columns]) -> PieceState:
        """As `Pace.state_of`."""
        return own_state(values)

    def check_readable(self, keys: Sequence[UnitKey]) -> None:
        """As `Pace.check_readable`: a slot that was not written is not found."""

    def lose(self, keys: Sequence[UnitKey]) -> None:
        """As `Pace.lose`: the disk's index knows."""

    def reset(self) -> None:
        """As `Pace.reset`."""


def own_state(values: Future[Columns]) -> PieceState:
    """How far a piece is in this process."""
    if not values.done():
        return PieceState.ON_ITS_WAY
    if values.exception() is not None:
        return PieceState.FAILED
    is_there = all(array.is_ready() for column in values.result() for array in column)
    return PieceState.THERE if is_there else PieceState.ON_ITS_WAY


__all__ = ["Columns", "OwnPace", "Pace", "PieceState", "own_state"]

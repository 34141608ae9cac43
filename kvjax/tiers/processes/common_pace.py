"""The pace of a worker whose pages lie on several processes: what counts as done is the same for all at every step.

Flow:    TierWorker -> [CommonPace] -> Reports of all processes

A store counts as done a fixed number of turns after its pages were read, and is waited for where it takes longer:
nobody needs to be told. A load takes as long as it takes, so processes tell each other (`Reports`). What fails in one
process fails in all: a load at once; a store when its unit is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from kvjax.errors import TierDataError
from kvjax.tiers.processes.common_index import CommonIndex, short_name
from kvjax.tiers.processes.reports import Reports
from kvjax.tiers.units import UnitKey
from kvjax.tiers.worker.pace import Columns, PieceState

STORE_TURNS = 2  # from the device to the host; and from there to the slots


class CommonPace:
    """A `Pace`. `index` is that of the disks, None: there are none."""

    def __init__(self, reports: Reports, index: CommonIndex | None) -> None:
        self._reports = reports
        self._index = index
        self._owner = len(reports.on_loss)
        reports.on_loss.append(self._forget_name)
        self._spoiled: set[UnitKey] = set()  # units that other processes have on their hosts
        self._disk_keys: dict[int, tuple[UnitKey, ...]] = {}  # of pieces

    def begin_turn(self) -> int:
        """As `Pace.begin_turn`; `Reports` has begun it, once for all workers."""
        return self._reports.turn

    def has_arrived(self, turn: int, *, is_ready: bool) -> bool:
        """As `Pace.has_arrived`; a thread waits for what is not ready."""
        return self._reports.turn - turn >= STORE_TURNS

    def has_ended(self, turn: int, *, is_done: bool) -> bool:
        """As `Pace.has_ended`."""
        return self._reports.turn - turn >= STORE_TURNS

    def end_store(
        self, keys: Sequence[UnitKey], slots: np.ndarray, is_good: np.ndarray, *, on_probation: bool = False
    ) -> np.ndarray:
        """As `Pace.end_store`: all that have a slot or a disk. What failed here is never read from its slot."""
        bad = {keys[i] for i in np.flatnonzero(~is_good).tolist()}
        self._spoiled -= set(keys)
        self._spoiled |= bad
        self.lose(list(bad))
        if self._index is None:
            return slots >= 0
        self._index.use(keys, on_probation=on_probation)
        return np.ones(len(keys), bool)

    def watch(self, values: Future[Columns], disk_keys: Sequence[UnitKey]) -> int:
        """As `Pace.watch`."""
        number = self._reports.watch(values)
        self._disk_keys[number] = tuple(disk_keys)
        return number

    def state_of(self, number: int, values: Future[Columns]) -> PieceState:
        """As `Pace.state_of`."""
        state = self._reports.state_of(number)
        if state in (PieceState.THERE, PieceState.FAILED):
            keys = self._disk_keys.pop(number)
            if self._index is not None:
                (self._index.use if state is PieceState.THERE else self._index.forget)(keys)
        return state

    def check_readable(self, keys: Sequence[UnitKey]) -> None:
        """As `Pace.check_readable`."""
        spoiled = self._spoiled.intersection(keys)
        if spoiled:
            raise TierDataError(f"{len(spoiled)} units did not come to this process's host; their tokens are computed")

    def lose(self, keys: Sequence[UnitKey]) -> None:
        """As `Pace.lose`."""
        if self._index is not None:
            self._reports.lose(self._owner, map(short_name, keys))

    def reset(self) -> None:
        """As `Pace.reset`."""
        self._reports.reset()
        self._disk_keys.clear()

    def _forget_name(self, name: int) -> None:
        if self._index is not None:
            self._index.forget_name(name)


__all__ = ["CommonPace"]

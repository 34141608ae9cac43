"""When a load counts as here: at once in one process; over several, once all of them have said how far theirs are.

Flow:    DecodeConnector, an arrival -> [LoadPace.watch] -> [LoadPace.state_of] -> what all write in one step
Source:  kvjax/tiers/processes/reports.py; docs/tiers.md, "Several processes"
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvjax.errors import TransferError
from kvjax.tiers.processes.reports import Reports
from kvjax.tiers.worker.pace import Columns, PieceState
from kvjax.transfer.peers.arrival import Arrival


class LoadPace(Protocol):
    """Of one connector."""

    def begin_turn(self) -> None:
        """The connector looks at its loads."""

    def watch(self, arrival: Arrival) -> int:
        """A load is on its way; its number."""

    def state_of(self, number: int) -> PieceState:
        """How far a load counts as; once it has ended it is not asked for again."""

    def forget(self, number: int) -> None:
        """A load was given up."""

    @property
    def must_be_asked(self) -> bool:
        """Whether a load may have ended that has not arrived here."""


class OwnLoads:
    """A `LoadPace` of one process."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._num_loads = 0
        self._loads: dict[int, tuple[Arrival, float]] = {}  # with the time from which on it is late

    def begin_turn(self) -> None:
        """Nobody else has to be told."""

    def watch(self, arrival: Arrival) -> int:
        """As `LoadPace.watch`."""
        self._num_loads += 1
        self._loads[self._num_loads] = arrival, self._clock() + self._timeout_s
        return self._num_loads

    def state_of(self, number: int) -> PieceState:
        """As `LoadPace.state_of`; what has failed is there too, and raises."""
        arrival, end_s = self._loads[number]
        state = PieceState.ON_ITS_WAY
        if arrival.is_ready:
            state = PieceState.THERE
        elif self._clock() > end_s:
            state = PieceState.LATE
        if state is not PieceState.ON_ITS_WAY:
            del self._loads[number]
        return state

    def forget(self, number: int) -> None:
        """As `LoadPace.forget`."""
        self._loads.pop(number, None)

    @property
    def must_be_asked(self) -> bool:
        """Whether a load is late."""
        now = self._clock()
        return any(now > end_s for _, end_s in self._loads.values())


class CommonLoads:
    """A `LoadPace` of one process among several, which all ask the same at the same steps."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def begin_turn(self) -> None:
        """As `Reports.begin_turn`."""
        self._reports.begin_turn()

    def watch(self, arrival: Arrival) -> int:
        """As `LoadPace.watch`."""
        return self._reports.watch(_arrays(arrival))

    def state_of(self, number: int) -> PieceState:
        """As `LoadPace.state_of`."""
        return self._reports.state_of(number)

    def forget(self, number: int) -> None:
        """As `LoadPace.forget`."""
        self._reports.forget(number)

    @property
    def must_be_asked(self) -> bool:
        """True: another process may have given one up, which a turn tells."""
        return True


def _arrays(arrival: Arrival) -> Future[Columns]:
    """What arrives, as reports look at it."""
    arrays: Future[Columns] = Future()

    def end() -> None:
        try:
            arrays.set_result(arrival.wait(0.0).arrays)
        except TransferError as error:
            arrays.set_exception(error)

    arrival.add_done_callback(end)
    return arrays


__all__ = ["CommonLoads", "LoadPace", "OwnLoads"]

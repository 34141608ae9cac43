"""What loads of all processes are at: each tells the others in one step, and all act on it in the next.

Flow:    pieces of loads in this process -> [Reports] -> board -> [Reports] of all -> states that all of them see alike
Source:  docs/tiers.md, "Several processes"

A turn, the same for all processes, since they make the same calls in the same order:

    1. collect   what all posted in the turn before, if they did; a piece counts by the reports of all
    2. post      how far each piece is here, if any is on its way; with a disk also every so many turns

A piece is there once it is there in all processes, and has failed if it has in one. Nothing is sent while nothing is
loaded, but for units that did not go to disk.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvjax.tiers.worker.pace import Columns, PieceState, own_state

TURNS_OF_LOSSES = 32
MOST_LOSSES = 4096  # in one report
_LETTERS = {PieceState.ON_ITS_WAY: "o", PieceState.THERE: "t", PieceState.FAILED: "f", PieceState.LATE: "l"}


class Board(Protocol):
    """`kvjax.device.mesh.processes.ProcessBoard`."""

    index: int

    def exchange(self, topic: str, text: str) -> list[str]:
        """The texts of all processes on a topic."""

    def post(self, topic: str, text: str) -> None:
        """Puts a text up."""

    def collect(self, topic: str) -> list[str]:
        """The texts of all processes on a topic that all post."""


@dataclass
class _Piece:
    values: Future[Columns]
    started_s: float


class Reports:
    """One process's side. Owned by the engine's thread; any thread may call `lose`."""

    def __init__(
        self,
        board: Board,
        *,
        timeout_s: float = math.inf,  # a piece that takes longer here has failed
        tells_losses: bool = False,  # whether there is a disk
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.turn = 0
        self.on_loss: list[Callable[[int], None]] = []  # by owner: what to do with the name of a lost unit
        self._board = board
        self._timeout_s = timeout_s
        self._tells_losses = tells_losses
        self._clock = clock
        self._num_pieces = 0
        self._pieces: dict[int, _Piece] = {}  # not known to have ended everywhere
        self._states: dict[int, PieceState] = {}  # of pieces, where not on their way
        self._losses: deque[tuple[int, int]] = deque()  # (owner, name)
        self._topic: str | None = None  # posted, not collected

    def begin_turn(self) -> None:
        """Takes note of what all processes have told, and tells them how far this one is.

        Raises:
            DivergenceError: a process tells nothing.
        """
        self.turn += 1
        if self._topic is not None:
            topic, self._topic = self._topic, None
            self._merge([json.loads(text) for text in self._board.collect(topic)])
        if self._pieces or (self._tells_losses and self.turn % TURNS_OF_LOSSES == 0):
            self._topic = f"loads {self.turn}"
            self._board.post(self._topic, self._report())

    def watch(self, values: Future[Columns]) -> int:
        """A piece is on its way in all processes; its number."""
        self._num_pieces += 1
        self._pieces[self._num_pieces] = _Piece(values, self._clock())
        return self._num_pieces

    def state_of(self, number: int) -> PieceState:
        """How far a piece is; one that has ended is forgotten."""
        state = self._states.get(number, PieceState.ON_ITS_WAY)
        if number not in self._pieces:
            self._states.pop(number, None)
        return state

    def forget(self, number: int) -> None:
        """A piece is of no use any more, in all processes."""
        self._pieces.pop(number, None)
        self._states.pop(number, None)

    def lose(self, owner: int, names: Iterable[int]) -> None:
        """Units, by numbers that name them, did not go to disk here."""
        self._losses.extend((owner, name) for name in names)

    def reset(self) -> None:
        """Forgets all pieces. What was posted is collected all the same."""
        self._pieces.clear()
        self._states.clear()

    def _report(self) -> str:
        now = self._clock()
        states = {number: _LETTERS[self._state_here(piece, now)] for number, piece in self._pieces.items()}
        losses = [self._losses.popleft() for _ in range(min(len(self._losses), MOST_LOSSES))]
        return json.dumps({"pieces": states, "losses": losses}, separators=(",", ":"))

    def _state_here(self, piece: _Piece, now: float) -> PieceState:
        state = own_state(piece.values)
        is_late = state is PieceState.ON_ITS_WAY and now - piece.started_s > self._timeout_s
        return PieceState.LATE if is_late else state

    def _merge(self, reports: list[dict]) -> None:  # type: ignore[type-arg]
        for report in reports:
            for owner, name in report["losses"]:
                self.on_loss[owner](name)
        for number in [int(number) for number in reports[self._board.index]["pieces"]]:
            letters = {report["pieces"].get(str(number), "o") for report in reports}
            if number not in self._pieces:  # it was reset
                continue
            is_bad = letters & {"f", "l"} or number in self._states
            if letters <= {"t", "f"}:
                del self._pieces[number]
                self._states[number] = PieceState.FAILED if is_bad else PieceState.THERE
            elif is_bad:
                self._states[number] = PieceState.LATE


__all__ = ["Board", "Reports"]

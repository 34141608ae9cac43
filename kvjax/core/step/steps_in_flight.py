"""Steps that are dispatched and not read yet: what a caller keeps whose host runs ahead of its device.

Flow:    StepPlan -> device; rows -> [StepsInFlight.start] -> the next step's tokens -> [StepsInFlight.read] -> rows
Source:  ARCHITECTURE.md, "Rows and steps in flight"

While a step is in flight its sampled tokens are on the device only: they are *pending*. The next step may compute them
all the same, since `build_step_plan(..., last_token_source=...)` says where the device finds them. Steps are read in
the order in which they started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvjax.core.requests.request_table import RequestTable


class _Step(NamedTuple):
    rows: np.ndarray  # int64[S]
    num_new_tokens: np.ndarray  # int[S]
    sampling_rows: np.ndarray  # int64[N] of `rows`
    fence: int  # the request table's open step: its rows are not issued again before it is closed


class StepsInFlight:
    """The steps in flight of one request table, used from its thread. A question costs nothing while there are none."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def num_pending(self, rows: np.ndarray) -> np.ndarray | int:  # int64[n]; 0 where nothing is in flight
        """Tokens of each row that are sampled and not read."""
        return self._sums([(step.sampling_rows, 1) for step in self._steps])[rows] if self._steps else 0

    def num_unread(self, rows: np.ndarray) -> np.ndarray | int:  # int64[n]; 0 where nothing is in flight
        """Tokens of each row that are computed in steps not read: `num_in_flight_tokens` of `plan_step`."""
        return self._sums([(step.rows, step.num_new_tokens) for step in self._steps])[rows] if self._steps else 0

    def num_left(self, rows: np.ndarray) -> np.ndarray:  # int64[n]
        """Tokens of each row that are to be computed, pending ones included."""
        left: np.ndarray = self._table.num_tokens[rows] - self._table.num_computed_tokens[rows]
        return left + self.num_pending(rows) if self._steps else left

    def token_source(self, rows: np.ndarray) -> np.ndarray | None:  # int32[n]
        """Where each row's newest token is among those that the newest step samples; -1: the host knows it.

        None where nothing is in flight: the host knows all.
        """
        if not self._steps:
            return None
        sampling_rows = self._steps[-1].sampling_rows
        source = np.full(self._table.capacity, -1, np.int32)
        source[sampling_rows] = np.arange(sampling_rows.size)
        return source[rows]

    def start(
        self,
        rows: np.ndarray,  # int64[S] distinct rows of requests
        num_new_tokens: np.ndarray,  # int[S]
        sampling_rows: np.ndarray,  # int64[N] of them, those whose next token the step samples, in its order
    ) -> None:
        """Notes a step that is dispatched: its tokens count as computed, and its rows are not issued again.

        Raises:
            ValueError: a row is unknown, without a request or named twice. Nothing is changed.
        """
        fence = self._table.open_step(rows)
        self._table.advance(rows, num_new_tokens)
        self._steps.append(_Step(rows.copy(), num_new_tokens.copy(), sampling_rows.copy(), fence))

    def read(self) -> np.ndarray:  # int64[N]
        """Ends the oldest step; its sampling rows, in the order of the tokens that the device has for them.

        A request that left the table since has none there: its token is to be dropped.

        Raises:
            ValueError: no step is in flight.
        """
        if not self._steps:
            raise ValueError("expected a step in flight to read, got none")
        step = self._steps.popleft()
        self._table.close_step(step.fence)
        return step.sampling_rows

    def _sums(self, parts: Iterable[tuple[np.ndarray, np.ndarray | int]]) -> np.ndarray:  # int64[rows of the table]
        """Each part is (distinct rows, what to add)."""
        sums = np.zeros(self._table.capacity, np.int64)
        for rows, counts in parts:
            sums[rows] += counts
        return sums

"""Steps that the device works on and whose tokens are not read yet: what they hold of running requests.

Flow:    Scheduler.start -> [StepsInFlight] -> Scheduler: tokens on their way -> Scheduler.update
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvjax.core.requests.request_table import RequestTable
from kvjax.engine.scheduled_step import ScheduledStep


class StepsInFlight:
    """At most a few steps of one scheduler, in the order in which they started; false where there are none."""

    def __init__(self, table: RequestTable) -> None:
        self._steps: deque[ScheduledStep] = deque()
        self._table = table

    def __len__(self) -> int:
        return len(self._steps)

    def start(self, step: ScheduledStep) -> None:
        """The step is dispatched."""
        self._steps.append(step)

    def end_first(self) -> None:
        """The oldest step is read."""
        self._steps.popleft()

    def num_pending(self, rows: np.ndarray) -> np.ndarray:  # int64[n] each
        """Tokens of each row that are sampled and not read, drafts not counted."""
        return self._sums([(step.rows[step.samples], 1) for step in self._steps])[rows]

    def num_computed(self, rows: np.ndarray) -> np.ndarray | int:  # int64[n] each
        """Tokens of each row that are computed in these steps."""
        if not self._steps:
            return 0
        return self._sums([(step.rows, step.num_new_tokens) for step in self._steps])[rows]

    def token_source(self, rows: np.ndarray) -> np.ndarray | None:  # int32[n] of int64[n]
        """Where the newest token of each row is among those that the last step samples; -1: the host knows it."""
        if not self._steps:
            return None
        sampling = self._steps[-1].rows[self._steps[-1].samples]
        source = np.full(self._table.capacity, -1, np.int32)
        source[sampling] = np.arange(sampling.size)
        return source[rows]

    def _sums(self, parts: list[tuple[np.ndarray, np.ndarray | int]]) -> np.ndarray:  # int64[rows]
        """Sums by row of the table; each part is (distinct rows, what to add)."""
        sums = np.zeros(self._table.capacity, np.int64)
        for rows, counts in parts:
            sums[rows] += counts
        return sums


__all__ = ["StepsInFlight"]

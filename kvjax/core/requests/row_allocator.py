"""Which rows of the request table are free, and which must wait because a step in flight still names them.

Flow:    RequestTable.add / release, open_step / close_step -> [RowAllocator] -> row numbers
Source:  ARCHITECTURE.md, "Rows and steps in flight"

A row is in exactly one state:

    free      the lowest free row is issued first
    owned     taken and not freed
    retiring  freed while open steps name it; free again when the last of them closes

Invariants (`check_invariants`):

    R1  every row is free, owned or retiring
    R2  a row's fence count is the number of open steps that name it; a retiring row has one at least
"""

from __future__ import annotations

import heapq

import numpy as np

from kvjax.errors import InvariantError


class RowAllocator:
    """Row numbers below `num_rows`, and the open steps that name them. Belongs to one `RequestTable`."""

    def __init__(self, num_rows: int):
        self._free = list(range(num_rows))  # a heap
        self._num_fences = np.zeros(num_rows, np.int64)
        self._is_retiring = np.zeros(num_rows, np.bool_)
        self._num_retiring = 0
        self._open_steps: dict[int, np.ndarray] = {}
        self._num_steps = 0

    @property
    def num_rows(self) -> int:
        """Rows in all states."""
        return self._num_fences.size

    @property
    def num_free(self) -> int:
        """Rows that `take` can issue."""
        return len(self._free)

    def take(self) -> int:
        """Issues the lowest free row; there must be one."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        """Takes an owned row back."""
        if self._num_fences[row]:
            self._is_retiring[row] = True
            self._num_retiring += 1
        else:
            heapq.heappush(self._free, row)

    def grow(self, num_rows: int) -> None:
        """Adds free rows up to `num_rows`."""
        old = self.num_rows
        self._num_fences = np.append(self._num_fences, np.zeros(num_rows - old, np.int64))
        self._is_retiring = np.append(self._is_retiring, np.zeros(num_rows - old, np.bool_))
        self._free += range(old, num_rows)  # above every row of the heap, so it stays one

    def open_step(self, rows: np.ndarray) -> int:  # rows: int64[n], owned and distinct
        """Notes that a step names these rows and returns its id."""
        step_id = self._num_steps
        self._num_steps += 1
        self._open_steps[step_id] = rows.copy()
        self._num_fences[rows] += 1
        return step_id

    def close_step(self, step_id: int) -> None:
        """Ends a step; retiring rows that no other step names become free.

        Raises:
            ValueError: no step of that id is open. Nothing is changed.
        """
        rows = self._open_steps.pop(step_id, None)
        if rows is None:
            raise ValueError(f"expected the id of an open step, got {step_id}; open: {sorted(self._open_steps)}")
        self._num_fences[rows] -= 1
        if not self._num_retiring:
            return
        for row in rows[self._is_retiring[rows] & (self._num_fences[rows] == 0)].tolist():
            self._is_retiring[row] = False
            self._num_retiring -= 1
            heapq.heappush(self._free, row)

    def check_invariants(self, owned: list[int]) -> None:
        """Checks R1 and R2, given the rows that are owned.

        Raises:
            InvariantError: one of them does not hold.
        """
        retiring = np.flatnonzero(self._is_retiring).tolist()
        states = sorted([*owned, *retiring, *self._free])
        if states != list(range(self.num_rows)):
            raise InvariantError(f"R1: owned {owned}, retiring {retiring}, free {sorted(self._free)}")
        named = np.zeros(self.num_rows, np.int64)
        for rows in self._open_steps.values():
            named[rows] += 1
        if not np.array_equal(named, self._num_fences) or not named[retiring].all():
            raise InvariantError(f"R2: fences {self._num_fences}, open steps name {named}, retiring {retiring}")
        if len(retiring) != self._num_retiring:
            raise InvariantError(f"R1: {self._num_retiring} rows counted as retiring, {retiring} are")

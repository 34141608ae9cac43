"""Runs of block-table columns in many rows: what one vectorised step gives back, appends or registers.

Flow:    counts of a SingleTypeKVCacheManager -> [Runs] -> table entries, places in one sequence of blocks
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Runs:
    """A run of columns in each of m rows out of the n rows of a step."""

    index: np.ndarray  # int64[m] ascending, which of the n rows
    rows: np.ndarray  # int64[m] rows of the table, distinct
    starts: np.ndarray  # int64[m] first column
    counts: np.ndarray  # int64[m] >= 1 columns

    @classmethod
    def between(cls, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Runs:
        """The columns [starts, ends) of each of int64[n] rows, where there are any."""
        index = (ends > starts).nonzero()[0]
        starts = starts[index]
        return cls(index, rows[index], starts, ends[index] - starts)

    @property
    def is_empty(self) -> bool:
        """Whether no row has a run."""
        return self.index.size == 0

    @property
    def is_single(self) -> bool:
        """Whether every run is one column, as in decoding."""
        return self.index.size == 0 or bool(self.counts.max() == 1)

    def part(self, start: int, end: int) -> Runs:
        """The runs of rows `start` to `end` of the n, counted from `start`."""
        if start == 0 and (self.is_empty or self.index[-1] < end):
            return self
        first, last = np.searchsorted(self.index, (start, end))
        return Runs(
            self.index[first:last] - start, self.rows[first:last], self.starts[first:last], self.counts[first:last]
        )

    def entries(self, *, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns int64[sum of counts], row by row."""
        return self.spread(self.rows), self.run_from(self.starts, descending=descending)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Each of int64[m] values as often as its row has columns."""
        return values if self.is_single else np.repeat(values, self.counts)

    def run_from(self, starts: np.ndarray, *, descending: bool = False) -> np.ndarray:
        """Per row the integers from int64[m] `starts` on, as many as it has columns."""
        if self.is_single:
            return starts
        inner = np.arange(self.counts.sum()) - self.spread(np.cumsum(self.counts) - self.counts)
        return self.spread(starts) + (self.spread(self.counts) - 1 - inner if descending else inner)

    def places(self, starts: np.ndarray, num_groups: int) -> np.ndarray:
        """int64[num_groups, sum of counts] places of the entries in a sequence of blocks.

        Row i's blocks stand from int64[m] `starts[i]` on, group by group.
        """
        places = self.run_from(starts)
        return places + np.arange(num_groups)[:, None] * self.spread(self.counts)


NO_RUNS = Runs(*(np.empty(0, np.int64) for _ in range(4)))


def row_major(runs: list[Runs], num_groups: list[int], num_rows: int) -> tuple[int, list[np.ndarray]]:
    """Lays the blocks of several managers' runs out in one sequence: rows in order, managers inner, groups inner.

    Returns:
        Its length, and per manager int64[m] where each run's blocks begin.
    """
    if len(runs) == 1:
        ends = runs[0].counts.cumsum() * num_groups[0]
        return (int(ends[-1]) if ends.size else 0), [ends - runs[0].counts * num_groups[0]]
    counts = np.zeros((num_rows, len(runs)), np.int64)
    for column, (run, groups) in enumerate(zip(runs, num_groups, strict=True)):
        counts[run.index, column] = run.counts * groups
    ends = counts.ravel().cumsum()
    starts = ends.reshape(counts.shape) - counts
    return int(ends[-1]), [starts[run.index, column] for column, run in enumerate(runs)]

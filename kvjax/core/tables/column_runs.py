"""Runs of block-table columns in many rows: what one vectorised step releases, appends or registers.

Flow:    counts of a SingleTypeKVCacheManager -> [Runs] -> table entries, shares of one sequence of blocks

One sequence of blocks serves all managers of a pool: rows in order, within a row the managers, within a manager the
groups, within a group the row's columns. `split` goes from that order to block tables, `merge` back.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """A run of columns in each of m rows out of the n rows of a step. A tuple, since a step makes several."""

    positions: np.ndarray  # int64[m] ascending, which of the n rows
    rows: np.ndarray  # int64[m] rows of the table, distinct
    starts: np.ndarray  # int64[m] first column
    counts: np.ndarray  # int64[m] >= 1 columns
    num_columns: int  # sum of counts

    @classmethod
    def between(cls, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Runs:
        """The columns [starts, ends) of each of int64[n] rows, where there are any."""
        counts = ends - starts
        positions = (counts > 0).nonzero()[0]
        if not positions.size:
            return NO_RUNS
        counts = counts[positions]
        return cls(positions, rows[positions], starts[positions], counts, np.add.reduce(counts).item())

    @classmethod
    def last(cls, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Runs:
        """The last of the columns [starts, ends) of each of int64[n] rows, where there are any."""
        positions = (ends > starts).nonzero()[0]
        if not positions.size:
            return NO_RUNS
        return cls(positions, rows[positions], ends[positions] - 1, np.ones_like(positions), positions.size)

    @property
    def is_single(self) -> bool:
        """Whether every run is one column, as in decoding."""
        return self.num_columns == self.positions.size

    def part(self, start: int, end: int) -> Runs:
        """The runs of rows `start` to `end` of the n, counted from `start`."""
        if not self.num_columns or (start == 0 and self.positions.item(-1) < end):
            return self
        first, last = np.searchsorted(self.positions, (start, end))
        counts = self.counts[first:last]
        positions = self.positions[first:last] - start
        return Runs(positions, self.rows[first:last], self.starts[first:last], counts, int(counts.sum()))

    def entries(self, *, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns int64[num_columns], row by row."""
        if self.is_single:
            return self.rows, self.starts
        return self.spread(self.rows), self._count_from(self.starts, descending)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Each of int64[m] values as often as its row has columns."""
        return values if self.is_single else np.repeat(values, self.counts)

    def places(self, starts: np.ndarray, num_groups: int) -> np.ndarray:
        """int64[num_groups, num_columns] where the blocks stand in one sequence, row i's from int64[m] starts[i] on."""
        places = starts if self.is_single else self._count_from(starts, descending=False)
        return places + np.arange(num_groups)[:, None] * self.spread(self.counts)

    def _count_from(self, starts: np.ndarray, descending: bool) -> np.ndarray:
        """Per row as many integers as it has columns, from int64[m] `starts` up, or down to `starts`."""
        before = self.counts.cumsum() - self.counts
        if descending:
            return self.spread(starts + self.counts - 1 + before) - np.arange(self.num_columns)
        return self.spread(starts - before) + np.arange(self.num_columns)


_NONE = np.empty(0, np.int64)
NO_RUNS = Runs(_NONE, _NONE, _NONE, _NONE, 0)


def split(block_ids: np.ndarray, runs: list[Runs], num_groups: list[int], num_rows: int) -> list[np.ndarray]:
    """Per manager int32[G, num_columns]: its share of int32[all] blocks in the common order."""
    if _are_alike(runs):  # every row has its groups' blocks side by side
        by_row = block_ids.reshape(-1, sum(num_groups))
        return [by_row[:, end - groups : end].T for groups, end in zip(num_groups, accumulate(num_groups), strict=True)]
    starts = _row_major_starts(runs, num_groups, num_rows)
    return [block_ids[run.places(start, groups)] for run, start, groups in zip(runs, starts, num_groups, strict=True)]


def _are_alike(runs: list[Runs]) -> bool:
    """Whether all runs are one column each, in the same rows."""
    if not all(run.is_single for run in runs):
        return False
    return len(runs) == 1 or len({run.positions.tobytes() for run in runs}) == 1


def merge(block_ids: list[np.ndarray], runs: list[Runs], num_rows: int) -> np.ndarray:
    """int32[all] the blocks of all managers in the common order, from int32[G, num_columns] of each."""
    if len(runs) == 1 and runs[0].is_single:
        return block_ids[0].T.ravel()
    num_groups = [len(ids) for ids in block_ids]
    merged = np.empty(sum(ids.size for ids in block_ids), np.int32)
    for ids, run, start in zip(block_ids, runs, _row_major_starts(runs, num_groups, num_rows), strict=True):
        merged[run.places(start, len(ids))] = ids
    return merged


def _row_major_starts(runs: list[Runs], num_groups: list[int], num_rows: int) -> list[np.ndarray]:
    """Per manager int64[m] where each run's blocks begin in the common order."""
    counts = np.zeros((num_rows, len(runs)), np.int64)
    for column, (run, groups) in enumerate(zip(runs, num_groups, strict=True)):
        counts[run.positions, column] = run.counts * groups
    starts = counts.ravel().cumsum().reshape(counts.shape) - counts
    return [starts[run.positions, column] for column, run in enumerate(runs)]

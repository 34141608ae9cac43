"""What a step allocates from one pool and frees there, row by row: what `EvictionPolicy.bulk_equivalent` is asked.

Flow:    StepPlanner -> [StepFlow] -> EvictionPolicy.bulk_equivalent -> rows that are planned at once

Totals are ready; what a policy may not need is computed when it asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.tables.row_changes import RowChanges


class StepFlow:
    """The n rows of a step in scheduling order, in one pool. Nothing of the step has happened yet."""

    __slots__ = ("_parts", "num_rows", "num_taken")

    def __init__(self, num_rows: int, parts: Sequence[tuple[np.ndarray, RowChanges]]) -> None:
        """`parts` are block tables of the pool, int32[groups, rows, columns] of a size each, and the step's changes."""
        self.num_rows = num_rows
        self._parts = parts
        self.num_taken = 0  # blocks that all rows take
        for tables, changes in parts:
            self.num_taken += changes.needed.num_columns * len(tables)

    def rows_within(self, num_blocks: int) -> int:
        """Leading rows that take at most `num_blocks` together."""
        if self.num_taken <= num_blocks:
            return self.num_rows
        return int(np.searchsorted(self._taken_by_row().cumsum(), num_blocks, side="right"))

    def _taken_by_row(self) -> np.ndarray:  # int64[n]
        taken = np.zeros(self.num_rows, np.int64)
        for tables, changes in self._parts:
            taken[changes.needed.positions] += changes.needed.counts * len(tables)
        return taken

    def released(self) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of which the rows drop a reference, and which of the n rows each: int64[k], int64[k], any order.

        A block that is shared need not become free.
        """
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        for tables, changes in self._parts:
            skipped = changes.skipped
            if skipped.num_columns:
                rows, columns = skipped.entries()
                entries = tables[:, rows, columns]
                real = entries != 0
                ids.append(entries[real])
                positions.append(np.broadcast_to(skipped.spread(skipped.positions), entries.shape)[real])
        if not ids:
            return _NONE, _NONE
        return np.concatenate(ids).astype(np.int64, copy=False), np.concatenate(positions)

    def rows_before(self, positions: np.ndarray) -> int:
        """Rows before the first of `positions`; all, if there is none."""
        return int(positions.min()) if positions.size else self.num_rows


_NONE = np.empty(0, np.int64)

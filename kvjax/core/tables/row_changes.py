"""What one step changes in the block tables of one manager, row by row.

Flow:    SingleTypeKVCacheManager.plan_rows -> [RowChanges] -> StepPlanner, EvictionPolicy.bulk_equivalent
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.core.tables.column_runs import Runs


class RowChanges(NamedTuple):
    """What one step does to n rows in one manager's groups, and what their counts are then."""

    skipped: Runs  # columns to release
    needed: Runs  # columns to append
    filled: Runs  # columns to register
    num_blocks: np.ndarray  # int64[n]
    num_cached_blocks: np.ndarray  # int64[n]
    first_live: np.ndarray  # int64[n], or empty where no block is released before the end
    idle_until: np.ndarray  # int64[n] see `row_idle_until`

    def part(self, start: int, end: int) -> RowChanges:
        """The changes of rows `start` to `end`."""
        return RowChanges(
            self.skipped.part(start, end),
            self.needed.part(start, end),
            self.filled.part(start, end),
            self.num_blocks[start:end],
            self.num_cached_blocks[start:end],
            self.first_live[start:end],
            self.idle_until[start:end],
        )

"""Which blocks of one kind are registered, and which of these no checkpoint of their row needs.

Flow:    Retention or an interval, a kind's `CheckpointNeed` -> [CheckpointColumns] -> what is registered
Source:  reachable_block_mask of vLLM 0.33 v1/core/single_type_kv_cache_manager.py, for its rules

What a hit of L tokens needs, with blocks of b tokens:

    blocks     0 ... | first_block(L) ... L/b - 1     | L/b ... L/b + num_after - 1 | ...
                     | seen by the token behind a hit | EAGLE's, which it drops     |

`first_block` never falls as L grows. So a block is needed by some multiple of the interval iff the first multiple
behind it needs it: one array of columns holds that for all rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.core.kinds.retention import Retention
from kvjax.core.tables.small_arrays import any_true


class CheckpointNeed:
    """What a hit of L tokens, a multiple of the block size, needs of one kind."""

    def __init__(
        self,
        block_size: int,
        count_skipped: Callable[[np.ndarray], np.ndarray],
        max_length: int,
        *,
        num_before: int = 0,
        num_after: int = 0,
        num_first: int = 0,
    ) -> None:
        """
        Args:
            block_size: tokens.
            count_skipped: of int64[n] lengths the leading tokens that no token behind them sees.
            max_length: most tokens of a hit.
            num_before: blocks that end at L, which a hit rests on even if the next token sees none.
            num_after: blocks behind L.
            num_first: of a request's first blocks.
        """
        self.block_size, self.num_after, self.num_first = block_size, num_after, num_first
        ends = np.arange(max_length // block_size + 1)
        skipped = count_skipped(ends * block_size) // block_size
        self.first_block = np.minimum(skipped, np.maximum(ends - num_before, 0)).astype(np.int32)  # by blocks of L

    def columns_of(self, length: int) -> tuple[int, int]:
        """The first block that a hit of `length` tokens needs, and the one behind the last."""
        end = length // self.block_size
        return self.first_block.item(end), end + self.num_after

    def includes(self, columns: np.ndarray, lengths: np.ndarray) -> np.ndarray:  # bool[n]
        """Whether a hit of any of int64[n, k] (or int64[1, k]) lengths above 0 needs each of int64[n] columns."""
        columns, ends = columns[:, None], lengths // self.block_size
        is_before = (columns < ends + self.num_after) & (ends > 0)
        is_needed = is_before & (columns >= self.first_block[ends]) | (columns < self.num_first)
        return np.logical_or.reduce(is_needed, axis=1)

    def needed_by_multiples(self, interval: int, num_columns: int) -> np.ndarray:  # bool[num_columns]
        """Whether a hit of any multiple of `interval` tokens needs a block."""
        columns, per_interval = np.arange(num_columns), interval // self.block_size
        ends = np.maximum((columns - self.num_after) // per_interval + 1, 1) * per_interval
        return columns >= self.first_block[np.minimum(ends, self.first_block.size - 1)]


class CheckpointColumns:
    """The checkpoints of one manager's rows. A call costs some microseconds; rows and columns are int64[n].

    One row may stand for all: int64[1].
    """

    def __init__(
        self,
        need: CheckpointNeed,
        interval: int,
        num_columns: int,
        retention: Retention | None,
        has_probation: bool = False,
    ) -> None:
        """Rows of at most `num_columns`; hits end every `interval` tokens (0: nowhere) and where `retention` says.

        `has_probation`: what the interval's need and the others do not is on probation.
        """
        self.need = need
        self.has_probation = has_probation
        self.retention = retention
        self._by_interval = np.zeros(num_columns, np.bool_)
        if interval:
            self._by_interval |= need.needed_by_multiples(interval, num_columns)
        self._by_interval[: need.num_first] = True
        self.keeps_every_block = bool(self._by_interval.all())  # whether every block is registered, on probation or not

    def keeps(self, length: int, lengths: np.ndarray) -> bool:
        """Whether all that a hit of `length` tokens needs is registered, of a row with checkpoints int64[1, k]."""
        columns = np.arange(*self.need.columns_of(length))
        return bool((self._by_interval[columns] | self.need.includes(columns, lengths)).all())

    def find_kept(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:  # bool[n]
        """Which blocks are registered."""
        own, kept = self.find_own(rows, columns), self._by_interval[columns]
        return kept if own is None else kept | own

    def find_own(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
        """bool[n] which blocks the rows' own checkpoints need: they are not on probation; None: none."""
        retention, need = self.retention, self.need
        if retention is None:
            return None
        starts = columns * need.block_size
        if need.num_after:
            starts -= need.num_after * need.block_size
        is_before = starts < retention.longest[rows]
        if any_true(is_before) or (need.num_first and any_true(columns < need.num_first)):
            return need.includes(columns, retention.lengths[rows])
        return None

    def stretches_on_probation(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """The columns of a row from `start` to `end` that no checkpoint of its own needs; none without probation."""
        if not self.has_probation or self.retention is None:
            return []
        lengths = {length for length in self.retention.lengths_of(row) if length}
        needed = sorted([(0, self.need.num_first), *map(self.need.columns_of, lengths)])
        stretches = []
        for first, behind in (*needed, (end, end)):
            if start < (stop := min(first, end)):
                stretches.append((start, stop))
            start = max(start, behind)
        return stretches


__all__ = ["CheckpointColumns", "CheckpointNeed"]

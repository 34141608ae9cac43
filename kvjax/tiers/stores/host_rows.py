"""Memory for the units of one pool on the host: rows, taken where they are written, and given back.

Flow:    HostStore -> [HostRows.take, give, cool] ; TierWorker's threads -> [HostRows.arrays]

There are addresses for as many rows as the whole host could hold of this pool alone. Row 0 is never used; another is

    cold    without memory: never written, or given back to the system
    used    somebody's, between `take` and `give`
    warm    nobody's, with the memory that it had
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

# Addresses are no promise of memory; Python names the flag since 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class HostRows:
    """Rows of one pool. `take`, `give` and `cool` are the scheduler's thread's; bytes of used rows their users'."""

    def __init__(self, num_rows: int, array_bytes: Sequence[int], *, has_bytes: bool = True) -> None:
        """`num_rows` cold rows, each of a part for each array; without `has_bytes` only their numbers."""
        self.num_rows = num_rows
        self.row_bytes = -(-sum(array_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.arrays: tuple[np.ndarray, ...] = ()  # uint8[num_rows + 1, bytes of a page] each
        self._memory: mmap.mmap | None = None
        self._num_touched = 0  # rows 1 to this have been used
        self._warm: list[int] = []
        self._cold: list[int] = []  # of those that have been used
        if has_bytes and num_rows and self.row_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._memory = mmap.mmap(-1, (num_rows + 1) * self.row_bytes, flags=flags)
            rows = np.frombuffer(self._memory, np.uint8).reshape(num_rows + 1, self.row_bytes)
            self.arrays = tuple(rows[:, start:end] for start, end in pairwise(accumulate(array_bytes, initial=0)))

    @property
    def num_used(self) -> int:
        """Used rows."""
        return self._num_touched - len(self._warm) - len(self._cold)

    @property
    def warm_bytes(self) -> int:
        """Bytes of memory that nobody uses."""
        return len(self._warm) * self.row_bytes

    def take(self, count: int) -> np.ndarray:  # int32[<= count]
        """Rows to use: warm ones first, then those that were used before; fewer where all others are used."""
        rows = _pop(self._warm, count)
        rows += _pop(self._cold, count - len(rows))
        first = self._num_touched + 1
        self._num_touched = min(self._num_touched + count - len(rows), self.num_rows)
        return np.array([*rows, *range(first, self._num_touched + 1)], np.int32)

    def give(self, rows: Sequence[int]) -> None:
        """Used rows are warm from now on."""
        self._warm.extend(rows)

    def cool(self) -> None:
        """Gives the memory of warm rows back to the system."""
        if self._memory is not None:
            rows = np.sort(self._warm)
            for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if rows.size else ():
                self._memory.madvise(mmap.MADV_DONTNEED, int(run[0]) * self.row_bytes, run.size * self.row_bytes)
        self._cold.extend(self._warm)
        self._warm.clear()


def _pop(rows: list[int], count: int) -> list[int]:
    """The last rows of a list, which loses them."""
    start = max(len(rows) - count, 0)
    taken = rows[start:]
    del rows[start:]
    return taken


__all__ = ["HostRows"]

"""A table of integers by row whose memory is committed where it is written, and returned to the system row by row.

Flow:    RequestTable (tokens), SingleTypeKVCacheManager (block ids) -> [RowTable] -> entries by row and column
Source:  ARCHITECTURE.md, "Host core"

A table has columns for the longest row that there may be and room for more rows than asked for, since address space
costs nothing: a row that gets longer copies nothing. Past the room a larger table takes its place, into which the
entries that rows own are copied.

    rows            memory
    up to 64 KiB    large pages where the system has them: fewer misses of the TLB. Rows in use lie side by side
    longer          small pages, committed one by one. `discard` returns those of a row that is done
    beyond 1 TiB    as many columns as fit, which double when a row needs more

Rows begin at odd multiples of a cache line: at a power of two all of them would fall into the same few cache sets.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

ENTRY_BYTES = 4
LINE_ENTRIES = 16  # of a cache line of 64 bytes
PAGE_ENTRIES = mmap.PAGESIZE // ENTRY_BYTES
DISCARD_ENTRIES = max(1 << 14, 2 * PAGE_ENTRIES)  # 64 KiB: fewer are not worth a system call, so a row keeps them
KEPT_ENTRIES = 4 * DISCARD_ENTRIES  # 256 KiB of a row that ends: to return and touch them again costs some 20 us
SMALL_BYTES = 1 << 20  # a table up to here is an ordinary array
MOST_BYTES = 1 << 40  # of the 2**47 that a process can address
ROOM = 4  # as many rows fit as are asked for first, times this
MIN_COLUMNS = 256  # of a table whose longest row is not known


class RowTable:
    """int32[num_tables, rows, columns], at first zeros. Owned by whoever writes it; not thread-safe.

    `entries`, `flat` and `lengths` are replaced when the table grows: read them through the table each time.
    """

    __slots__ = ("_memory", "_num_spare_rows", "entries", "flat", "lengths", "max_columns", "num_columns", "stride")

    def __init__(self, num_tables: int, num_rows: int, max_columns: int | None, min_columns: int = 0) -> None:
        """
        Args:
            num_tables: tables of the same rows.
            num_rows: rows of each.
            max_columns: entries of the longest row that is foreseen; None: not known.
            min_columns: entries that a row must be able to hold at once.
        """
        self.max_columns = max_columns
        self.lengths = np.zeros(num_rows, np.int64)  # [rows] leading entries that the row owns, written by the owner
        self._allocate(num_tables, num_rows, min_columns)

    @property
    def num_tables(self) -> int:
        """Tables of the same rows."""
        return self.entries.shape[0]

    def reserve_columns(self, num_columns: int) -> None:
        """Makes every row able to hold `num_columns` entries; copies only where more than foreseen are needed."""
        if num_columns > self.num_columns:
            self._replace(self.lengths.size, max(num_columns, 2 * self.num_columns))

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the tables have at least `num_rows` rows; copies only where the room ends."""
        missing = num_rows - self.lengths.size
        if missing <= 0:
            return
        if missing <= self._num_spare_rows:
            self._num_spare_rows -= missing
            self._show(self.num_tables, num_rows, self.num_columns)
        else:
            self._replace(num_rows, self.num_columns)
        self.lengths = np.append(self.lengths, np.zeros(missing, np.int64))

    def discard(self, row: int, start: int, end: int) -> None:
        """Returns the memory of a row's entries `start` to `end`, which are not needed any more, to the system.

        Reading them afterwards gives zeros or the old values. Less than 64 KiB is kept, and short rows are.
        """
        if self._memory is None or end - start < DISCARD_ENTRIES or not hasattr(mmap, "MADV_DONTNEED"):
            return
        num_rows = self.lengths.size + self._num_spare_rows
        for table in range(self.num_tables):
            origin = (table * num_rows + row) * self.stride
            first, last = -(-(origin + start) // PAGE_ENTRIES), (origin + end) // PAGE_ENTRIES
            self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    def discard_row(self, row: int, num_entries: int) -> None:
        """`discard` of a row that ends with so many entries; up to 256 KiB stay for the row's next owner."""
        if num_entries > KEPT_ENTRIES:
            self.discard(row, 0, num_entries)

    def discard_behind(self, row: int, start: int, end: int) -> None:
        """`discard` of what a window that moves from `start` on to `end` leaves behind.

        In stretches of 64 KiB, so that a window that moves by one block a step costs a system call every so many steps.
        """
        first, last = start // DISCARD_ENTRIES, end // DISCARD_ENTRIES
        if last > first:
            self.discard(row, first * DISCARD_ENTRIES, last * DISCARD_ENTRIES)

    def discard_behind_n(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """`discard_behind` of int64[n] rows, starts and ends."""
        for i in np.flatnonzero(starts // DISCARD_ENTRIES < ends // DISCARD_ENTRIES).tolist():
            self.discard_behind(rows.item(i), starts.item(i), ends.item(i))

    @property
    def has_long_rows(self) -> bool:
        """Whether `discard` can return anything."""
        return self._memory is not None and self.num_columns > DISCARD_ENTRIES

    def owned(self) -> np.ndarray:  # int32[sum of num_tables * lengths]
        """A copy of what the rows own: row by row, within a row table by table."""
        rows = np.flatnonzero(self.lengths).tolist()
        parts = [self.entries[:, row, : self.lengths.item(row)].ravel() for row in rows]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    @classmethod
    def restored(
        cls, num_tables: int, max_columns: int | None, num_columns: int, lengths: np.ndarray, owned: np.ndarray
    ) -> RowTable:
        """A table with int64[rows] `lengths`, this very array, and what `owned` told of another table."""
        table = cls(num_tables, lengths.size, max_columns, num_columns)
        table.lengths = lengths
        end = 0
        for row in np.flatnonzero(lengths).tolist():
            start, end = end, end + num_tables * lengths.item(row)
            table.entries[:, row, : lengths.item(row)] = owned[start:end].reshape(num_tables, -1)
        return table

    def __deepcopy__(self, memo: dict[int, Any]) -> RowTable:
        """A table of its own; `lengths` stays one array with the owner's name for it."""
        lengths = memo.setdefault(id(self.lengths), self.lengths.copy())
        return self.restored(self.num_tables, self.max_columns, self.num_columns, lengths, self.owned())

    # -- memory -------------------------------------------------------------------------------------------------------

    def _allocate(self, num_tables: int, num_rows: int, min_columns: int) -> None:
        """Memory for the columns that are foreseen, or as many as there is address space for.

        Raises:
            MemoryError: there is not enough for `min_columns`. Nothing is changed.
        """
        least = max(min_columns, 1)
        columns, spare_rows = max(least, self.max_columns or MIN_COLUMNS), (ROOM - 1) * num_rows
        while True:
            stride = (-(-columns // LINE_ENTRIES) | 1) * LINE_ENTRIES
            num_bytes = ENTRY_BYTES * stride * num_tables * (num_rows + spare_rows)
            is_last_try = columns == least and not spare_rows
            if num_bytes <= SMALL_BYTES:
                memory, flat = None, np.zeros(num_bytes // ENTRY_BYTES, np.int32)
                break
            if num_bytes <= MOST_BYTES or is_last_try:
                try:
                    memory = _committed_on_touch(num_bytes, large_pages=stride <= DISCARD_ENTRIES)
                    flat = np.frombuffer(memory, np.int32)
                    break
                except (OSError, ValueError, OverflowError):  # the system limits the address space
                    if is_last_try:
                        raise MemoryError(
                            f"expected {num_bytes} bytes for {num_rows} rows of {columns} entries"
                        ) from None
            if columns > least:
                columns = max(columns // 2, least)
            else:
                spare_rows = 0
        self._memory, self._num_spare_rows = memory, spare_rows
        self.flat, self.stride = flat, stride  # all entries in the order of memory, and from one row to the next
        self._show(num_tables, num_rows, columns)

    def _show(self, num_tables: int, num_rows: int, num_columns: int) -> None:
        self.num_columns = num_columns  # entries that a row can hold
        by_row = self.flat.reshape(num_tables, num_rows + self._num_spare_rows, self.stride)
        self.entries = by_row[:, :num_rows, :num_columns]  # int32[num_tables, rows, columns]

    def _replace(self, num_rows: int, num_columns: int) -> None:
        """Larger memory with what the rows own, but for stretches of zeros, which a window leaves behind."""
        before = self.entries
        self._allocate(len(before), num_rows, num_columns)
        for row in np.flatnonzero(self.lengths).tolist():
            length = self.lengths.item(row)
            for start in range(0, length, DISCARD_ENTRIES):
                part = slice(start, min(start + DISCARD_ENTRIES, length))
                if length <= DISCARD_ENTRIES or before[:, row, part].any():
                    self.entries[:, row, part] = before[:, row, part]


def _committed_on_touch(num_bytes: int, large_pages: bool) -> mmap.mmap:
    """Zeroed memory that takes room where it is written."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which counts it as used all the same
        return mmap.mmap(-1, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    advice = "MADV_HUGEPAGE" if large_pages else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(getattr(mmap, advice))
    return memory

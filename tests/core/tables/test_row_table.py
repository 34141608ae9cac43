"""Rows keep what they own while a table grows, cost memory for that alone, and give it back."""

from __future__ import annotations

import copy
import mmap
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.tables import row_table
from kvjax.core.tables.row_table import DISCARD_ENTRIES, KEPT_ENTRIES, RowTable

LONG = 1_000_000
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")


def fill(table: RowTable, row: int, length: int, seed: int = 0) -> np.ndarray:
    """Gives a row so many entries and returns them, int32[num_tables, length]."""
    values = np.random.default_rng((seed, row)).integers(1, 1 << 30, (table.num_tables, length)).astype(np.int32)
    table.reserve_columns(length)
    table.entries[:, row, :length] = values
    table.lengths[row] = length
    return values


@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([None, 1, 40, 300, LONG]),
    st.lists(
        st.tuples(st.sampled_from(["rows", "columns", "fill", "copy"]), st.integers(0, 30), st.integers(0, 600)),
        max_size=12,
    ),
)
def test_rows_keep_what_they_own(
    num_tables: int, num_rows: int, max_columns: int | None, calls: list[tuple[str, int, int]]
) -> None:
    table, model = RowTable(num_tables, num_rows, max_columns), {}
    for name, row, length in calls:
        if name == "rows":
            table.reserve_rows(row)
        elif name == "columns":
            table.reserve_columns(length)
            assert table.num_columns >= length
        elif name == "copy":
            table = copy.deepcopy(table)
        elif row < table.lengths.size:
            model[row] = fill(table, row, length)
        num_rows = max(num_rows, row if name == "rows" else 0)
        assert table.entries.shape == (num_tables, num_rows, table.num_columns)
        assert table.lengths.tolist() == [len(model[i][0]) if i in model else 0 for i in range(num_rows)]
        for i, values in model.items():
            assert np.array_equal(table.entries[:, i, : table.lengths[i]], values)
            start = i * table.stride  # rows of the first table in the order of memory
            assert np.array_equal(table.flat[start : start + table.lengths[i]], values[0])


def test_entries_are_zero_until_they_are_written() -> None:
    for max_columns in (10, 5_000, LONG):
        table = RowTable(2, 30, max_columns)
        table.entries[1, 3] = 7
        assert np.count_nonzero(table.entries) == table.num_columns


def test_growth_keeps_the_zeros_of_a_long_row() -> None:
    table = RowTable(2, 4, LONG)
    values = fill(table, 1, 3 * DISCARD_ENTRIES)
    values[:, 5::7] = table.entries[:, 1, 5 : 3 * DISCARD_ENTRIES : 7] = 0
    table.reserve_rows(100)
    assert np.array_equal(table.entries[:, 1, : 3 * DISCARD_ENTRIES], values)


def test_a_row_as_long_as_foreseen_copies_nothing() -> None:
    table = RowTable(2, 8, LONG)
    flat = table.flat
    fill(table, 3, LONG)
    table.reserve_rows(32)  # room is kept for four times the rows
    assert table.flat is flat
    assert table.num_columns == LONG
    assert flat.size == 2 * 4 * 8 * table.stride  # and for no more


@pytest.mark.parametrize("max_columns", [None, 300, 1 << 14, LONG])
def test_rows_do_not_share_cache_sets(max_columns: int | None) -> None:
    """Their distance is an odd number of cache lines, so 64 rows begin in 64 sets."""
    table = RowTable(1, 64, max_columns)
    lines = np.arange(64) * table.stride // 16
    assert table.stride % 16 == 0
    assert len(set((lines % 64).tolist())) == 64


def test_growth_copies_only_what_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the room, an entry behind a row's length is not carried along."""
    table = RowTable(1, 4, 100)
    fill(table, 2, 5)
    table.entries[0, 2, 5:] = 9
    table.entries[0, 1] = 9
    table.reserve_rows(100)
    assert np.count_nonzero(table.entries) == 5


def test_a_table_that_the_system_refuses_has_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def refuse(num_bytes: int, large_pages: bool) -> mmap.mmap:
        made.append(num_bytes)
        if num_bytes > 1 << 24:
            raise OSError("no address space")
        return mmap.mmap(-1, num_bytes)

    monkeypatch.setattr(row_table, "_committed_on_touch", refuse)
    table = RowTable(1, 4, LONG)
    assert len(made) > 1
    values = fill(table, 1, 1_000)
    for call in (lambda: table.reserve_columns(4 * LONG), lambda: table.reserve_rows(LONG)):
        with pytest.raises(MemoryError, match=r"expected \d+ bytes for \d+ rows of \d+ entries"):
            call()
        assert table.lengths.tolist() == [0, 1_000, 0, 0]
        assert table.entries.shape == (1, 4, table.num_columns)
        assert np.array_equal(table.entries[:, 1, :1_000], values)
        assert np.array_equal(table.flat[table.stride : table.stride + 1_000], values[0])


def test_more_than_can_be_addressed_is_not_asked_for() -> None:
    table = RowTable(1, 256, 1 << 50)
    assert table.num_columns < 1 << 31
    fill(table, 3, 10)


def test_what_is_discarded_reads_as_zero_or_as_before() -> None:
    table = RowTable(2, 4, LONG)
    values = [fill(table, row, LONG - 7 * row) for row in range(4)]
    table.discard(2, 5_000, 500_000)
    for row in (0, 1, 3):
        assert np.array_equal(table.entries[:, row, : table.lengths[row]], values[row])
    left = table.entries[:, 2, : table.lengths[2]]
    assert np.array_equal(left[:, :5_000], values[2][:, :5_000])
    assert np.array_equal(left[:, 500_000:], values[2][:, 500_000:])
    assert (np.isin(left, [0]) | (left == values[2])).all()


# -- memory: measured in a process of its own

RESIDENT = """
import numpy as np
from kvjax.core.tables.row_table import RowTable, DISCARD_ENTRIES
def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4 / 1024  # MiB
"""


def resident_mib(code: str) -> list[float]:
    """What `code` prints, run where nothing else allocates."""
    command = [sys.executable, "-c", RESIDENT + code]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [float(word) for word in out.split()]


@needs_linux
def test_memory_is_that_of_what_rows_own() -> None:
    """256 rows of a million entries would be 1 GB: a page each is used, and 4 MB for the one that is long."""
    before, made, short, long, done = resident_mib("""
table = RowTable(1, 1, 10)
print(resident())
table = RowTable(1, 256, 1_000_000)
print(resident())
table.entries[:, :, :500] = 1
print(resident())
table.entries[:, 3] = 1
print(resident())
table.discard_row(3, 1_000_000)
print(resident())
""")
    assert made - before < 1
    assert short - made < 3
    assert 3 < long - short < 6
    assert done - short < 1


@needs_linux
def test_a_window_that_moves_holds_memory_for_itself_only() -> None:
    """8 MB pass through a row; the window and a stretch behind it stay."""
    before, after = resident_mib("""
table, size = RowTable(2, 256, 1_000_000), 1_000
table.entries[:, :, :16] = 1
print(resident())
for end in range(size, 1_000_000, size):
    table.entries[:, 5, end - size : end] = 1
    table.discard_behind(5, max(end - 2 * size, 0), end - size)
print(resident())
""")
    assert after - before < 1


@needs_linux
def test_growth_touches_only_what_rows_own() -> None:
    before, after = resident_mib("""
table = RowTable(6, 64, 70_000)
table.entries[:, :, :100] = 1
table.lengths[:] = 100
table.entries[:, 3, 60_000:] = 1  # a window
table.lengths[3] = 70_000
print(resident())
table.reserve_rows(1024)
print(resident())
""")
    assert after - before < 5


def test_short_stretches_are_kept() -> None:
    table = RowTable(1, 4, LONG)
    values = fill(table, 0, LONG)
    table.discard(0, 0, DISCARD_ENTRIES - 1)
    table.discard_behind(0, 10, DISCARD_ENTRIES - 1)
    assert np.array_equal(table.entries[:, 0, :LONG], values)


def test_a_row_that_ends_short_keeps_its_memory() -> None:
    """A prompt of 64k tokens or less is followed by others: its pages are not returned and touched anew."""
    table = RowTable(1, 4, 4 * KEPT_ENTRIES)
    values = fill(table, 0, KEPT_ENTRIES)
    table.discard_row(0, KEPT_ENTRIES)
    assert np.array_equal(table.entries[:, 0, :KEPT_ENTRIES], values)


@needs_linux
def test_discarded_pages_of_every_table_read_as_zero() -> None:
    """Linux drops private pages at once: that they are gone shows in what they read as."""
    table = RowTable(3, 4, LONG)
    fill(table, 2, LONG)
    table.discard(2, 5_000, 500_000)
    gone = table.entries[:, 2, 8_000:400_000]  # whole pages of up to 64 KiB
    assert not gone.any()
    assert table.entries[:, 2, :5_000].all()
    assert table.entries[:, 2, 500_000:].all()


def test_memory_is_that_of_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], mmap.mmap

    def noted(fileno: int, length: int, **options: int) -> mmap.mmap:
        made.append(fileno)
        return real(fileno, length, **options)

    monkeypatch.setattr(mmap, "mmap", noted)
    RowTable(2, 8, LONG)
    assert made == [-1]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages")
@pytest.mark.parametrize(("max_columns", "flag"), [(DISCARD_ENTRIES // 2, "hg"), (LONG, "nh")])
def test_long_rows_have_small_pages_and_others_large_ones(max_columns: int, flag: str) -> None:
    """/proc/self/smaps lists what the system was told of the mapping that the table lies in."""
    table = RowTable(1, 64, max_columns)
    address = table.flat.ctypes.data
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in part.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            assert flag in part.partition("VmFlags:")[2].split()
            return
    pytest.fail("expected a mapping at the table's address")

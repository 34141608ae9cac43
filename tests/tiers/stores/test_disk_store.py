"""Units on disk: what is read is what was written, whoever dies, whatever flips, however full the disk is."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.errors import TierDataError
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores import disk_store, outage
from kvjax.tiers.stores.disk_store import DiskStore, name_of
from kvjax.tiers.units import UnitKey
from tests.damage import flipped

IDENTITY = {"layout": "a", "weights": "m"}
UNIT = 4096


def key_of(number: int, group_id: int = 0) -> UnitKey:
    return UnitKey(group_id, BlockHash(number.to_bytes(32, "big")))


def unit_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, UNIT, dtype=np.uint8)


def make_store(folder: Path, max_bytes: int = 1 << 24, identity: dict[str, str] = IDENTITY) -> DiskStore:
    return DiskStore(folder, max_bytes, identity)


def read(store: DiskStore, number: int) -> np.ndarray:
    out = np.zeros(UNIT, np.uint8)
    store.get(key_of(number), out)
    return out


def unit_file(folder: Path, number: int) -> Path:
    (found,) = folder.rglob(name_of(key_of(number)))
    return found


def test_units_survive_a_restart(tmp_path: Path) -> None:
    first = make_store(tmp_path)
    for number in range(20):
        assert first.put(key_of(number), unit_of(number))
    second = make_store(tmp_path)
    for number in range(20):
        assert second.has(key_of(number))
        np.testing.assert_array_equal(read(second, number), unit_of(number))
    assert not second.has(key_of(20))
    assert not second.has(key_of(1, group_id=1))
    assert second.num_bytes == first.num_bytes


@pytest.mark.parametrize("place", [0, 9, 20, 40, 60, 200, UNIT])
def test_a_flipped_bit_is_a_miss(tmp_path: Path, place: int) -> None:
    store = make_store(tmp_path)
    store.put(key_of(1), unit_of(1))
    path = unit_file(tmp_path, 1)
    path.write_bytes(flipped(path.read_bytes(), place))
    with pytest.raises(TierDataError, match=r"expected a unit|checksum"):
        read(store, 1)
    assert not store.has(key_of(1))
    assert not path.exists()
    assert store.put(key_of(1), unit_of(1))
    np.testing.assert_array_equal(read(store, 1), unit_of(1))


@pytest.mark.parametrize("length", [0, 10, 60, 500])
def test_a_file_cut_short_is_a_miss(tmp_path: Path, length: int) -> None:
    store = make_store(tmp_path)
    store.put(key_of(1), unit_of(1))
    os.truncate(unit_file(tmp_path, 1), length)
    with pytest.raises(TierDataError, match="expected"):
        read(store, 1)


def test_a_unit_under_another_name_is_a_miss(tmp_path: Path) -> None:
    """So units of one tenant are never read as another's: the name has its hash, and the hash its salt."""
    store = make_store(tmp_path)
    store.put(key_of(1), unit_of(1))
    path = unit_file(tmp_path, 1)
    path.rename(path.with_name(name_of(key_of(2))))
    with pytest.raises(TierDataError, match="expected a unit of this name"):
        read(store, 2)


@pytest.mark.parametrize("other", [{"layout": "b", "weights": "m"}, {"layout": "a", "weights": "n"}, {"layout": "a"}])
def test_a_store_of_another_cache_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    make_store(tmp_path).put(key_of(1), unit_of(1))
    with pytest.raises(ValueError, match=r"is of another cache: .* there, .* here; give this one a folder of its own"):
        make_store(tmp_path, identity=other)
    assert make_store(tmp_path).has(key_of(1))


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.put(key_of(1), unit_of(1))
    store.name_weights("1", "digest")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4, "a unit, a version, the lock and STORE.json"
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="expected an empty folder or a store of units"):
        make_store(tmp_path)
    (tmp_path / "STORE.json").write_text("[")
    with pytest.raises(ValueError, match=r"but STORE\.json is none"):
        make_store(tmp_path)


def test_a_full_disk_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    store.put(key_of(1), unit_of(1))
    before = store.num_bytes
    write = os.write

    def full(file: int, data: memoryview) -> int:
        if len(data) > 1_000:
            write(file, data[:1_000])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "write", full)
        assert not store.put(key_of(2), unit_of(2))
    assert store.stats.num_disk_skips == 1
    assert not store.has(key_of(2))
    assert not list((tmp_path / "tmp").iterdir())
    assert store.num_bytes == before
    np.testing.assert_array_equal(read(store, 1), unit_of(1))
    assert store.put(key_of(2), unit_of(2))


def grow_older(folder: Path) -> None:
    """Every unit was used a second earlier: a file system's clock may stand still between two uses."""
    for path in (folder / "units").rglob("*-*"):
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))


def test_units_used_longest_ago_make_room(tmp_path: Path) -> None:
    size = 41_800  # of ten units and their headers
    store = make_store(tmp_path, size)
    for number in range(40):
        assert store.put(key_of(number), unit_of(number))
        grow_older(tmp_path)
        if store.has(key_of(0)):
            read(store, 0)
        assert store.num_bytes <= size
        assert sum(path.stat().st_size for path in (tmp_path / "units").rglob("*-*")) <= size
    assert store.has(key_of(0))
    assert store.has(key_of(39))
    assert not store.has(key_of(1))
    assert not store.put(key_of(50), np.zeros(size, np.uint8))


def test_units_on_probation_make_room_until_they_are_read(tmp_path: Path) -> None:
    """The oldest first; whatever is lasting stays while there is one, and so does one that was read."""
    store = make_store(tmp_path, 41_800)  # ten units and their headers
    for number in range(4):
        store.put(key_of(number), unit_of(number))
    for number in range(4, 8):
        store.put(key_of(number), unit_of(number), on_probation=True)
    read(store, 4)
    for number in range(8, 12):
        store.put(key_of(number), unit_of(number))
    assert [number for number in range(12) if not store.has(key_of(number))] == [5, 6, 7]


def _write_for_ever(folder: Path, started: object) -> None:
    store = make_store(folder)
    number = 1_000
    while True:
        store.put(key_of(number), unit_of(number))
        number += 1
        if number == 1_020:
            started.set()  # type: ignore[attr-defined]


def test_a_killed_writer_leaves_whole_units(tmp_path: Path) -> None:
    """Two processes share the folder; one is killed in the middle of its work."""
    store = make_store(tmp_path)
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        started = context.Event()
        writer = context.Process(target=_write_for_ever, args=(tmp_path, started))
        writer.start()
        assert started.wait(30)
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
    orphan = tmp_path / "tmp" / f"{writer.pid}-0"
    orphan.write_bytes(b"half a unit")
    store.refresh()
    assert store.has(key_of(1_000))
    found = list((tmp_path / "units").rglob("*-*"))
    assert len(found) >= 20
    for number in range(1_000, 1_000 + len(found)):
        np.testing.assert_array_equal(read(store, number), unit_of(number))
    again = make_store(tmp_path)
    assert not orphan.exists()
    assert again.num_bytes == sum(path.stat().st_size for path in found)


def test_another_process_may_delete_what_the_index_knows(tmp_path: Path) -> None:
    first, second = make_store(tmp_path), make_store(tmp_path)
    first.put(key_of(1), unit_of(1))
    assert not second.has(key_of(1))
    second.refresh()
    assert second.has(key_of(1))
    first.delete(key_of(1))
    with pytest.raises(TierDataError, match="on disk no more"):
        read(second, 1)
    assert not second.has(key_of(1))


@contextmanager
def lock_held(folder: Path) -> Iterator[None]:
    """As another process holds it: locks of two open files exclude each other, whoever opened them."""
    with open(folder / ".lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_lock_that_stays_held_costs_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it is let go the next unit is kept; what was kept before can be read all the time."""
    monkeypatch.setattr(disk_store, "LOCK_WAIT_S", 0.2)
    monkeypatch.setattr(outage, "CALM_S", 0.0)
    store = make_store(tmp_path)
    store.put(key_of(0), unit_of(0))
    with lock_held(tmp_path):
        start_s = time.monotonic()
        assert not any(store.put(key_of(number), unit_of(number)) for number in range(1, 100))
        np.testing.assert_array_equal(read(store, 0), unit_of(0))
        assert time.monotonic() - start_s < 5.0  # of 20 with a wait for each
        with pytest.raises(TierDataError, match=r"another process holds the lock .*\.lock, waited 0 s; end it if"):
            _ = store.num_bytes
    assert len(outages(caplog)) == store.stats.num_disk_outages == 1
    assert "another process holds the lock" in store.stats.disk_problem
    assert store.put(key_of(1), unit_of(1))
    assert not store.stats.disk_problem
    assert "keeps units again" in outages(caplog)[-1]
    assert store.num_bytes == 2 * unit_file(tmp_path, 1).stat().st_size


def test_a_store_is_not_opened_under_a_held_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path)
    monkeypatch.setattr(disk_store, "OPEN_WAIT_S", 0.1)
    with lock_held(tmp_path), pytest.raises(TierDataError, match=r"another process holds .* waited 0\.1 s"):
        make_store(tmp_path)


@pytest.mark.parametrize("part", ["", "units", "tmp"])
def test_a_folder_that_is_deleted_comes_back(tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    store = make_store(folder)
    store.put(key_of(1), unit_of(1))
    shutil.rmtree(folder / part)
    store.refresh()
    assert store.has(key_of(1)) == (part == "tmp")
    for number in range(2, 6):
        store.put(key_of(number), unit_of(number))
    assert store.has(key_of(5))
    np.testing.assert_array_equal(read(store, 5), unit_of(5))
    assert make_store(folder).has(key_of(5))
    assert store.num_bytes == sum(path.stat().st_size for path in (folder / "units").rglob("*-*"))
    assert len(outages(caplog)) == 1


def test_a_folder_that_another_cache_has_taken_is_left_alone(tmp_path: Path) -> None:
    """Deleted, and made by an engine of another model: its units are not ours, nor ours its."""
    folder = tmp_path / "store"
    first = make_store(folder)
    first.put(key_of(1), unit_of(1))
    shutil.rmtree(folder)
    second = make_store(folder, identity={"layout": "b"})
    second.put(key_of(1), unit_of(2))
    assert not first.put(key_of(3), unit_of(3))
    assert "is of another cache" in first.stats.disk_problem
    second.refresh()
    assert not second.has(key_of(3))
    with pytest.raises(TierDataError, match="its checksum is not that of its bytes"):
        read(first, 1)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 16, b"\x00" * 7, struct.pack("<q", -(1 << 40)), struct.pack("<q", 1 << 60)]
)
def test_a_damaged_count_is_made_anew(tmp_path: Path, data: bytes) -> None:
    store = make_store(tmp_path, 41_800)
    for number in range(8):
        store.put(key_of(number), unit_of(number))
    before = store.num_bytes
    (tmp_path / ".lock").write_bytes(data)
    assert store.num_bytes == before
    for number in range(8, 40):
        assert store.put(key_of(number), unit_of(number))
        assert sum(path.stat().st_size for path in (tmp_path / "units").rglob("*-*")) <= 41_800


def test_units_that_cannot_be_deleted_are_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that became read-only: no unit is written beyond `max_bytes`."""
    store = make_store(tmp_path, 41_800)
    for number in range(10):
        store.put(key_of(number), unit_of(number))
    before = sorted((tmp_path / "units").rglob("*-*"))

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not store.put(key_of(10), unit_of(10))
    assert "of 41800 bytes and cannot be deleted" in store.stats.disk_problem
    assert sorted((tmp_path / "units").rglob("*-*")) == before


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_a_miss(tmp_path: Path, kind: str) -> None:
    store = make_store(tmp_path)
    store.put(key_of(1), unit_of(1))
    path = unit_file(tmp_path, 1)
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}[kind]()
    with pytest.raises(TierDataError):
        read(store, 1)
    assert not store.has(key_of(1))


def test_an_outage_is_told_once_until_it_is_calm(caplog: pytest.LogCaptureFixture) -> None:
    now_s, stats = 0.0, TierStats()
    told = outage.Outage("the store", stats, clock=lambda: now_s)
    for _ in range(100):  # every other unit fits
        told.failed(OSError("no room"))
        now_s += 1.0
        told.worked()
    assert outages(caplog) == [
        "the store: no room; what it cannot keep is computed again, and it is tried with every unit"
    ]
    assert stats.disk_problem == "the store: no room"
    now_s += outage.CALM_S
    told.worked()
    assert outages(caplog)[1:] == ["the store: keeps units again, after 110 s"]
    assert not stats.disk_problem
    told.failed(OSError("no room"))
    assert (stats.num_disk_outages, len(outages(caplog))) == (2, 3)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="expected max_bytes >= 1, got 0"):
        DiskStore("nowhere", 0, IDENTITY)

"""Units on disk: what is read is what was written, whoever dies, whatever flips, however full the disk is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.errors import TierDataError
from kvjax.tiers.stores import disk_store
from kvjax.tiers.stores.disk_store import DiskStore, name_of
from kvjax.tiers.units import UnitKey

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
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(bytes(data))
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


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="expected max_bytes >= 1, got 0"):
        DiskStore("nowhere", 0, IDENTITY)

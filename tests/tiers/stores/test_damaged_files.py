"""A folder whose files others change: what is read is what was written or a miss, and the store goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TierDataError
from tests.tiers.stores.test_disk_store import key_of, make_store, read, unit_of

NUM_UNITS = 12


def change(rng: np.random.Generator, folder: Path) -> None:
    """One change of one file: its bytes, its length, its name, its kind, or that it is there."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "STORE.json"]
    path = files[rng.integers(len(files))]
    data = bytearray(path.read_bytes())
    kind = rng.integers(9)
    if kind < 3 and data:
        place = int(rng.integers(min(len(data), 200) if kind else len(data)))  # most of them in the header
        data[place] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
    elif kind == 3:
        path.write_bytes(data[: rng.integers(len(data) + 1)])
    elif kind == 4:
        path.write_bytes(data + rng.bytes(50))
    elif kind == 5:
        os.replace(path, files[rng.integers(len(files))])
    elif kind == 6:
        path.write_bytes(rng.bytes(int(rng.integers(5_000))))
    elif kind == 7:
        path.unlink()
    elif path.name != ".lock":
        path.unlink()
        path.mkdir()
        shutil.rmtree(path) if rng.integers(2) else None


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_file_is_a_miss_or_what_was_written(seed: int, tmp_path: Path) -> None:
    """1,000 changes in all, of units, of the count and of the lock; each is followed by reads and writes of all."""
    rng = np.random.default_rng(seed)
    store, num_misses = make_store(tmp_path, 60_000), 0
    for _ in range(250):
        for number in range(NUM_UNITS):
            store.put(key_of(number), unit_of(number))
        change(rng, tmp_path)
        if rng.integers(4) == 0:
            store.refresh()
        if rng.integers(20) == 0:
            store = make_store(tmp_path, 60_000)
        for number in range(NUM_UNITS):
            try:
                found = read(store, number)
            except TierDataError:
                num_misses += 1
            else:
                np.testing.assert_array_equal(found, unit_of(number))
    assert num_misses > 80
    for folder in tmp_path.glob("units/*/*/"):
        folder.rmdir()
    store = make_store(tmp_path, 60_000)
    for number in range(NUM_UNITS):
        assert store.put(key_of(number), unit_of(number))
        np.testing.assert_array_equal(read(store, number), unit_of(number))


@pytest.mark.parametrize("text", ["", "[]", "[" * 1_000_000, "\x00", '{"layout": 1}', "9" * 5_000])
def test_a_damaged_store_file_is_refused_by_one_error(text: str, tmp_path: Path) -> None:
    make_store(tmp_path)
    (tmp_path / "STORE.json").write_text(text)
    with pytest.raises(ValueError, match=r"expected a store of units|is of another cache"):
        make_store(tmp_path)

"""A folder whose files others change: what is read is what was written or a miss, and the store goes on."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TierDataError
from tests.damage import damaged
from tests.tiers.stores.test_disk_store import key_of, make_store, read, unit_of

NUM_UNITS = 12
HEADER = 200  # bytes of a file that hold it


def change(rng: random.Random, folder: Path) -> None:
    """One change of one file: its bytes, its length, its name, its kind, or that it is there."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "STORE.json"]
    path = rng.choice(files)
    data = path.read_bytes()
    kind = rng.randrange(9)
    if kind < 4:
        end = rng.choice((HEADER, HEADER, len(data)))
        path.write_bytes(damaged(data[:end], rng) + data[end:])
    elif kind == 4:
        path.write_bytes(data + rng.randbytes(50))
    elif kind == 5:
        os.replace(path, rng.choice(files))
    elif kind == 6:
        path.write_bytes(rng.randbytes(rng.randrange(5_000)))
    elif kind == 7:
        path.unlink()
    elif path.name != ".lock":
        path.unlink()
        path.mkdir()
        shutil.rmtree(path) if rng.randrange(2) else None


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_file_is_a_miss_or_what_was_written(seed: int, tmp_path: Path) -> None:
    """1,000 changes in all, of units, of the count and of the lock; each is followed by reads and writes of all."""
    rng = random.Random(seed)
    store, num_misses = make_store(tmp_path, 60_000), 0
    for _ in range(250):
        for number in range(NUM_UNITS):
            store.put(key_of(number), unit_of(number))
        change(rng, tmp_path)
        if rng.randrange(4) == 0:
            store.refresh()
        if rng.randrange(20) == 0:
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

"""The hash index against a plain dict of lists: duplicates kept in order, runs, bulk equal to one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvjax.core.pool.block_hash_map import FEW_HASHES, LARGEST_CHUNK, BlockHashToBlockMap


def hashes(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_popping_what_is_not_registered_changes_nothing() -> None:
    index = BlockHashToBlockMap()
    index.insert(b"one", 1)
    index.insert_n([b"two", b"two"], ids(2, 3))
    before = index.snapshot()
    assert not index.pop(b"one", 2)
    assert not index.pop(b"two", 1)
    assert not index.pop(b"none", 1)
    assert index.snapshot() == before == {b"one": (1,), b"two": (2, 3)}


def test_membership_is_by_hash_and_by_block() -> None:
    index = BlockHashToBlockMap()
    index.insert_n([b"a", b"a", b"b"], ids(1, 2, 3))
    assert b"a" in index
    assert b"c" not in index
    assert index.contains(b"a", 2)
    assert not index.contains(b"a", 3)
    assert not index.contains(b"c", 3)


@pytest.mark.parametrize("seed", range(40))
def test_bulk_equals_one_by_one(seed: int) -> None:
    """Few distinct hashes, so that one call often meets a hash several times."""
    rng = random.Random(seed)
    names = hashes(rng.choice([1, 3, 30]), seed)
    bulk, single = BlockHashToBlockMap(), BlockHashToBlockMap()
    registered: dict[int, bytes] = {}
    for _ in range(60):
        if rng.random() < 0.5:
            new = rng.sample(
                [b for b in range(1, 60) if b not in registered], rng.randint(0, min(6, 59 - len(registered)))
            )
            keys = [rng.choice(names) for _ in new]
            bulk.insert_n(keys, np.array(new, np.int64))
            for key, block_id in zip(keys, new, strict=True):
                single.insert(key, block_id)
            registered |= dict(zip(new, keys, strict=True))
        else:
            gone = rng.sample(sorted(registered), rng.randint(0, len(registered)))
            keys = [registered.pop(block_id) for block_id in gone]
            bulk.pop_n(keys, np.array(gone, np.int64))
            for key, block_id in zip(keys, gone, strict=True):
                assert single.pop(key, block_id)
        assert bulk.snapshot() == single.snapshot()
        firsts = [-1 if single.get_one_block(name) is None else single.get_one_block(name) for name in names]
        assert bulk.get_many(names).tolist() == firsts


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize(
    "length", [0, 1, 2, FEW_HASHES - 1, FEW_HASHES, FEW_HASHES + 1, 72, 73, LARGEST_CHUNK, 584, 585, 2_048]
)
def test_a_run_ends_at_the_first_miss(length: int, duplicates: bool, goes_on: bool) -> None:
    """Whether hashes behind the miss are known or not."""
    known, unknown = hashes(2_048), hashes(2_048, seed=1)
    index = BlockHashToBlockMap()
    block_ids = np.random.default_rng(0).permutation(2_048).astype(np.int64) + 1
    index.insert_n(known, block_ids)
    if duplicates:
        index.insert_n(known[::7], np.arange(5_000, 5_000 + len(known[::7])))
    behind = [unknown[0], *known[length:]] if goes_on else unknown[length:]
    run = index.find_run([*known[:length], *behind])
    assert run.dtype == np.int32
    assert run.tolist() == block_ids[:length].tolist()

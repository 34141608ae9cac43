"""Laws of the block pool that a random history does not spell out: orders, the null block, refusals, memory."""

from __future__ import annotations

import copy
import tracemalloc

import numpy as np
import pytest

from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError


def hashes(count: int, start: int = 0) -> list[bytes]:
    return [(start + i).to_bytes(32, "big") for i in range(count)]


def filled_pool(num_blocks: int = 9, **options) -> BlockPool:
    """Blocks 1 to 4 hashed and free, 5 and 6 free, 7 and 8 held; 7 is hashed."""
    pool = BlockPool(num_blocks, free_order="append", **options)
    ids = pool.get_new_blocks(8)
    pool.register_many(ids[[0, 1, 2, 3, 6]], hashes(5), 0)
    pool.free_blocks(ids[:6])
    return pool


def free_order(pool: BlockPool) -> list[int]:
    pool.check_invariants()
    return pool.eviction_policy.order().tolist()


@pytest.mark.parametrize("num_blocks", range(2, 8))
def test_running_out_changes_nothing(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    before = pool.snapshot()
    with pytest.raises(OutOfBlocksError, match=f"needs {num_blocks} blocks, {num_blocks - 1} free"):
        pool.get_new_blocks(num_blocks)
    assert pool.snapshot() == before
    assert pool.get_new_blocks(num_blocks - 1).tolist() == list(range(1, num_blocks))
    with pytest.raises(OutOfBlocksError, match="needs 1 blocks, 0 free"):
        pool.get_new_block()


def test_the_null_block_is_never_touched_freed_hashed_or_evicted() -> None:
    pool = BlockPool(4, enable_kv_cache_events=True)
    before = pool.snapshot()
    pool.touch([0, 0])
    pool.free_blocks([0])
    pool.free_blocks([0])
    pool.evict_blocks([0])
    assert pool.snapshot() == before
    assert pool.take_events() == []
    assert 0 not in pool.get_new_blocks(3)
    assert pool.null_block.is_null
    assert pool.null_block.ref_cnt == 0


@pytest.mark.parametrize("ids", [[1], [3, 3], [4, 3, 2], [0, 1]])
@pytest.mark.parametrize("order", ["append", "uncached_first"])
def test_giving_back_too_often_changes_nothing(ids: list[int], order: str) -> None:
    pool = BlockPool(5, free_order=order)
    pool.get_new_blocks(4)
    pool.touch([4])
    pool.free_blocks([1, 2])
    before = pool.snapshot()
    with pytest.raises(BlockStateError, match=r"block \d has [01] references, [12] freed"):
        pool.free_blocks(ids)
    pool.check_invariants()
    assert pool.snapshot() == before


def test_freeing_one_block_twice_is_refused() -> None:
    pool = BlockPool(3)
    pool.free_blocks([pool.get_new_block()])
    with pytest.raises(BlockStateError, match="block 1 has 0 references, 1 freed"):
        pool.free_blocks([1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.register_many([7], hashes(1), 0), BlockStateError, "block 7 is hashed already"),
        (lambda p: p.register_many([8, 5], hashes(2), 0), BlockStateError, "block 5 is free or null"),
        (lambda p: p.register_many([0], hashes(1), 0), BlockStateError, "block 0 is free or null"),
        (lambda p: p.register_many([8, 8], hashes(2), 0), BlockStateError, "block 8 is given 2 times"),
        (lambda p: p.register_many([8], hashes(2), 0), ValueError, "expected a hash for each of 1 blocks, got 2"),
        (lambda p: p.register_many([8], hashes(1), 1), ValueError, r"expected a group of \(0,\), got 1"),
        (lambda p: p.cache_full_blocks(None, [8, 8], hashes(1), 0, 0), ValueError, "for each of 2 blocks, got 1"),
        (lambda p: p.cache_full_blocks(None, [8, 0], hashes(1), 0, 0), ValueError, "for each of 2 blocks, got 1"),
        (lambda p: p.free_blocks(np.array([7, -1], np.int32)), ValueError, r"expected block ids in \[0, 9\), got -1"),
        (lambda p: p.free_blocks(np.array([9], np.int32)), ValueError, r"expected block ids in \[0, 9\), got 9"),
        (lambda p: p.touch([-1]), ValueError, r"expected block ids in \[0, 9\), got -1"),
        (lambda p: p.touch([1, 9]), ValueError, r"expected block ids in \[0, 9\), got 9"),
        (lambda p: p.free_blocks([7, 9]), ValueError, r"expected block ids in \[0, 9\), got 9"),
        (lambda p: p.free_blocks([9]), ValueError, r"expected block ids in \[0, 9\), got 9"),
        (lambda p: p.evict_blocks([-2]), ValueError, r"expected block ids in \[0, 9\), got -2"),
        (lambda p: p.free_blocks([7.0]), ValueError, "expected a row of integer block ids, got float64"),
        (lambda p: p.free_blocks([[7], [8]]), ValueError, "expected a row of integer block ids, got int64"),
        (lambda p: p.get_new_blocks(-1), ValueError, "expected num_blocks >= 0, got -1"),
        (lambda p: p.find_run([], 4), ValueError, r"expected a group of \(0,\), got 4"),
        (lambda p: p.find_each([], 4), ValueError, r"expected a group of \(0,\), got 4"),
        (lambda p: p.get_cached_block(b"", [4]), ValueError, r"expected a group of \(0,\), got 4"),
        (lambda p: p.register_group(4, None), ValueError, r"expected a group of \(0,\), got 4"),
    ],
)  # fmt: skip
def test_a_refused_call_changes_nothing(call, error: type[Exception], message: str) -> None:
    pool = filled_pool()
    before = pool.snapshot()
    with pytest.raises(error, match=message):
        call(pool)
    pool.check_invariants()
    assert pool.snapshot() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 1}, r"expected num_blocks >= 2 \(block 0 is the null block\), got 1"),
        ({"num_blocks": 4, "free_order": "lifo"}, "expected free_order of append, uncached_first, got 'lifo'"),
        ({"num_blocks": 4, "group_ids": ()}, "expected distinct group ids, at least one"),
        ({"num_blocks": 4, "group_ids": (1, 1)}, "expected distinct group ids, at least one"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockPool(**arguments)


def test_without_caching_nothing_is_registered() -> None:
    pool = BlockPool(4, enable_caching=False)
    ids = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="expected a pool with enable_caching=True"):
        pool.register_many(ids, hashes(1), 0)


def test_a_copy_goes_its_own_way() -> None:
    pool = filled_pool()
    before = pool.snapshot()
    twin = copy.deepcopy(pool)
    twin.get_new_blocks(5)
    twin.check_invariants()
    assert pool.snapshot() == before != twin.snapshot()


@pytest.mark.parametrize(
    ("corrupt", "law"),
    [
        (lambda p: p.ref_count.__setitem__(2, 1), "P1: block 2"),
        (lambda p: p.ref_count.__setitem__(8, 0), "P1: block 8"),
        (lambda p: p.ref_count.__setitem__(8, -1), "P1: block 8"),
        (lambda p: p.ref_count.__setitem__(0, 1), "P2"),
        (lambda p: p.eviction_policy.queue.append(0), "P2"),
        (lambda p: p.is_hashed.__setitem__(1, False), "P3"),
        (lambda p: p.is_hashed.__setitem__(8, True), "P3"),
        (lambda p: p.hash_maps[0].insert(b"other", 8), "P3"),
        (lambda p: p.hash_maps[0].pop(hashes(1)[0], 1), "P3"),
        (lambda p: setattr(p.prefix_index, "num_hashed", 9), "P3"),
        (lambda p: setattr(p.hash_maps[0], "num_shared", 1), "P3: group 0"),
    ],
)
def test_the_checker_sees_a_broken_pool(corrupt, law: str) -> None:
    pool = copy.deepcopy(filled_pool())  # every pool that is constructed is checked after the test
    pool.check_invariants()
    corrupt(pool)
    with pytest.raises(InvariantError, match=law):
        pool.check_invariants()


def test_describe_says_what_is_held_cached_and_next() -> None:
    text = filled_pool().describe()
    assert "pool of 9 blocks" in text
    assert "held    2 (25.0%)" in text
    assert "free    6, 4 of them cached; next [1, 2, 3, 4, 5, 6]" in text
    assert "hashed  5, 5 distinct hashes" in text


def test_a_million_blocks_take_at_most_64_bytes_each() -> None:
    """Ring 16, positions 8, hash 8, group 4, reference count 4, scratch 4, hashed 1: 45 bytes a block."""
    num_blocks = 1_000_000
    tracemalloc.start()
    try:
        pool = BlockPool(num_blocks)
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.num_free_blocks == num_blocks - 1
    assert current <= peak <= 64 * num_blocks

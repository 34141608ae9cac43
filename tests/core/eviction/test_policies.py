"""Every policy against its naive model: random lives of a pool, the same order and blocks after each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockPool, CostAwarePolicy, EvictionPolicy, KVCacheManager, LRUPolicy, SegmentedLRUPolicy
from kvjax.core.eviction import LearnedPolicy, ProbationLRUPolicy, StepFlow, make_eviction_policy
from kvjax.core.pool.prefix_index import PrefixIndex
from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError
from tests.core.eviction.naive_learned import NaiveLearned, bin_of
from tests.core.eviction.naive_policies import (
    NaiveCostAware,
    NaiveLRU,
    NaivePolicy,
    NaiveProbationLRU,
    NaiveSegmentedLRU,
)
from tests.core.manager.manager_lockstep import FULL

BLOCK_SIZE = 4
OFTEN: dict[str, Any] = {"max_ghosts": 6, "learn_every": 3}
Models = tuple[Callable[[PrefixIndex], EvictionPolicy], Callable[[int], NaivePolicy]]
POLICIES: dict[str, Models] = {
    "lru": (LRUPolicy, NaiveLRU),
    "probation": (ProbationLRUPolicy, NaiveProbationLRU),
    "learned": (LearnedPolicy, NaiveLearned),
    "learned_often": (
        partial(LearnedPolicy, max_ghosts=6, learn_every=3),
        partial(NaiveLearned, max_ghosts=6, learn_every=3),
    ),
    "slru": (SegmentedLRUPolicy, lambda n: NaiveSegmentedLRU(n, (n - 1) // 5)),
    "slru_all": (partial(SegmentedLRUPolicy, protected_share=1.0), lambda n: NaiveSegmentedLRU(n, n - 1)),
    "slru_half": (partial(SegmentedLRUPolicy, protected_share=0.5), lambda n: NaiveSegmentedLRU(n, (n - 1) // 2)),
    "slru_none": (partial(SegmentedLRUPolicy, protected_share=0.0), lambda n: NaiveSegmentedLRU(n, 0)),
    "cost": (CostAwarePolicy, lambda n: NaiveCostAware(n, 30_500.0)),
    "cost_steep": (partial(CostAwarePolicy, attention_parity_tokens=10.0), lambda n: NaiveCostAware(n, 10.0)),
}


class Life:
    """A pool and a naive policy, led through the same calls."""

    def __init__(self, models: Models, num_blocks: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = BlockPool(num_blocks, hash_block_size=BLOCK_SIZE, eviction_policy=models[0])
        self.naive = models[1](num_blocks)
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.num_hashes = 0
        self.asked_for: set[int] = set()  # blocks that were hit since they were taken

    def some(self, blocks: list[int], most: int = 6) -> list[int]:
        count = int(self.rng.integers(0, min(len(blocks), most) + 1))
        return self.rng.permutation(blocks)[:count].tolist() if blocks else []

    def held(self) -> list[int]:
        return [block for block, count in self.refs.items() if count]

    def take(self) -> None:
        count = int(self.rng.integers(0, 7))
        if count > len(self.naive.order()):
            with pytest.raises(OutOfBlocksError, match=f"needs {count} blocks, {len(self.naive.order())} free"):
                self.pool.get_new_blocks(count)
            return
        one_by_one = self.rng.random() < 0.5
        ours = [self.pool.get_new_block() for _ in range(count)] if one_by_one else self.pool.get_new_blocks(count)
        theirs = self.naive.take(count)
        assert list(ours) == theirs
        for block in theirs:
            self.refs[block] = 1
            self.naive.hashed.discard(block)
            self.asked_for.discard(block)

    def release(self) -> None:
        blocks = self.some(self.held())
        freed = [block for block in blocks if self.refs[block] == 1]
        for block in blocks:
            self.refs[block] -= 1
        if self.rng.random() < 0.5:
            blocks[len(blocks) // 2 : len(blocks) // 2] = [0]  # null blocks are passed over
            self.pool.free_blocks(np.array(blocks, np.int32))
        else:
            self.pool.free_held(np.array(blocks, np.int64))
        self.naive.release(freed)

    def release_one(self) -> None:
        for block in self.some(self.held(), most=1):
            self.pool.free_blocks([block])
            self.refs[block] -= 1
            if not self.refs[block]:
                self.naive.release([block])

    def touch(self) -> None:
        blocks = self.some(list(self.refs))
        self.pool.touch(blocks)
        for block in blocks:
            if not self.refs[block]:
                self.naive.remove(block)
            self.refs[block] += 1
        self.naive.hits(blocks)
        self.asked_for.update(blocks)

    def register(self) -> None:
        blocks = self.some([block for block in self.held() if block not in self.naive.hashed])
        columns = self.rng.integers(0, 9, len(blocks))
        hashes = self.hashes(len(blocks))
        if self.rng.random() < 0.5:
            self.pool.register_many(np.array(blocks, np.int32), hashes, 0, columns)
        else:
            for block, block_hash, column in zip(blocks, hashes, columns.tolist(), strict=True):
                self.pool.register_few([block], [block_hash], column, 0)
        for block, column in zip(blocks, columns.tolist(), strict=True):
            self.naive.hashed.add(block)
            self.naive.hash_of[block] = hashes[blocks.index(block)]
            self.naive.registered(block, column * BLOCK_SIZE, BLOCK_SIZE)

    def hashes(self, count: int) -> list[bytes]:
        """New ones, some that were evicted, in order, or any that were ever used, of other blocks too."""
        cached = {self.naive.hash_of[block] for block in self.naive.hashed} if self.rng.random() < 0.7 else set()
        old = [h for h in map(self.to_bytes, range(self.num_hashes)) if h not in cached]
        if self.rng.random() < 0.5 and len(old) >= count:
            first = int(self.rng.integers(len(old) - count + 1))
            return old[first : first + count]
        self.num_hashes += count
        return list(map(self.to_bytes, range(self.num_hashes - count, self.num_hashes)))

    @staticmethod
    def to_bytes(number: int) -> bytes:
        return number.to_bytes(8, "big")

    def admit(self) -> None:
        for _ in range(self.rng.choice([1, 40, 30_000], p=[0.8, 0.15, 0.05])):
            self.pool.eviction_policy.note_admission()
            self.naive.admitted()

    def put_on_probation(self) -> None:
        blocks = self.some([block for block in self.held() if block in self.naive.hashed - self.asked_for])
        self.pool.eviction_policy.note_probation(np.array(blocks, np.int64))
        for block in blocks:
            self.naive.put_on_probation(block)

    def keep(self) -> None:
        blocks = self.some(sorted(self.naive.hashed))
        self.pool.eviction_policy.note_lasting(np.array(blocks, np.int64))
        self.naive.kept(blocks)

    def plan_step(self) -> None:
        self.pool.eviction_policy.note_step_planned()
        self.naive.step_planned()

    def evict(self) -> None:
        blocks = self.some(list(self.refs), most=3)
        self.pool.evict_blocks(blocks)
        self.forget([block for block in blocks if block in self.naive.hashed])

    def forget(self, blocks: list[int]) -> None:
        self.naive.hashed.difference_update(blocks)
        self.naive.all_forgotten(blocks)

    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held())
        if not self.held():
            self.forget(sorted(self.naive.hashed))

    def check(self) -> None:
        self.pool.check_invariants()
        assert self.pool.eviction_policy.order().tolist() == self.naive.order()
        assert self.pool.num_free_blocks == len(self.naive.order())
        self.check_that_blanks_go_first()
        self.check_what_was_learned()

    def check_that_blanks_go_first(self) -> None:
        """Unhashed blocks precede all others under every policy but plain LRU, and those of a step that goes on."""
        if not isinstance(self.naive, NaiveLRU | NaiveProbationLRU):
            hashed = [block in self.naive.hashed for block in self.naive.order()]
            assert hashed == sorted(hashed)

    def check_what_was_learned(self) -> None:
        """The worth of each class of runs by age."""
        for i, each in enumerate(self.pool.eviction_policy.learned()):
            for age, worth in each.worth_by_age:
                assert worth == pytest.approx(self.naive.worth[i][bin_of(age)], rel=1e-5)

    def go(self, num_calls: int) -> None:
        calls = [self.take, self.release, self.release, self.release_one, self.touch, self.register, self.register]
        calls += [self.put_on_probation, self.keep, self.plan_step, self.admit]
        for _ in range(num_calls):
            if self.rng.random() < 0.05:
                (self.evict if self.rng.random() < 0.7 else self.reset)()
            else:
                calls[self.rng.integers(len(calls))]()
            self.check()


@pytest.mark.parametrize("num_blocks", [2, 3, 5, 9, 17, 40])
@pytest.mark.parametrize("name", POLICIES)
def test_agrees_with_its_naive_model(name: str, num_blocks: int) -> None:
    for seed in range(2 if "learned" in name else 6):
        Life(POLICIES[name], num_blocks, seed).go(150)


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", [name for name in POLICIES if "learned" in name])
def test_what_is_learned_agrees_with_its_naive_model_sweep(name: str) -> None:
    for seed in range(100, 400):
        Life(POLICIES[name], 2 + seed % 50, seed).go(200)


def cycle(life: Life, count: int) -> None:
    """Blocks are taken, registered at random columns and released, as the model has it."""
    blocks = life.pool.get_new_blocks(count).tolist()
    assert blocks == life.naive.take(count)
    for block in blocks:
        life.naive.hashed.discard(block)
    columns = life.rng.integers(0, 50, count)
    life.pool.register_many(blocks, [life.rng.bytes(8) for _ in blocks], 0, columns)
    for block, column in zip(blocks, columns.tolist(), strict=True):
        life.naive.hashed.add(block)
        life.naive.registered(block, column * BLOCK_SIZE, BLOCK_SIZE)
    life.pool.free_blocks(blocks)
    life.naive.release(blocks)


def test_many_blocks_agree_too() -> None:
    """More blocks than the sorted front of the cost-aware policy holds."""
    for name in ("slru", "cost", "cost_steep"):
        life = Life(POLICIES[name], 1_500, seed=1)
        for _ in range(12):
            cycle(life, 110)
            life.check()
        left = len(life.naive.order())
        for count in (300, 7, 400, left - 707):
            assert life.pool.get_new_blocks(count).tolist() == life.naive.take(count)


@pytest.mark.parametrize("name", ["cost", "cost_steep"])
def test_hits_after_pressure_leave_nothing_behind(name: str) -> None:
    """Blocks are hit and released again while none is taken: the order is right, and no list grows with the hits."""
    life = Life(POLICIES[name], 200, seed=2)
    for _ in range(2):  # the second time cached blocks are reused, in order of priority
        cycle(life, 150)
    order: Any = life.pool.eviction_policy._cached  # type: ignore[attr-defined]
    for i in range(300):
        blocks = life.rng.permutation(sorted(life.naive.hashed))[:20].tolist()
        life.pool.touch(blocks)
        for block in blocks:
            life.naive.remove(block)
            life.naive.hit(block)
        life.pool.free_blocks(blocks)
        life.naive.release(blocks)
        assert sum(entries.shape[1] for entries in order._late) <= max(200, order._front_size)
        if i % 30 == 0:
            life.check()
    assert life.pool.get_new_blocks(199).tolist() == life.naive.take(199)


@pytest.mark.parametrize("name", POLICIES)
def test_a_copy_goes_its_own_way(name: str) -> None:
    life = Life(POLICIES[name], 12, seed=3)
    life.go(80)
    before = life.pool.snapshot()
    twin = copy.deepcopy(life.pool)
    twin.get_new_blocks(twin.num_free_blocks)
    twin.check_invariants()
    assert life.pool.snapshot() == before


def held_and_hashed(pool: BlockPool, columns: list[int]) -> np.ndarray:
    blocks = pool.get_new_blocks(len(columns))
    hashes = [bytes([i, pool.num_evicted_blocks, pool.num_hashed_blocks]) for i in range(len(columns))]
    pool.register_many(blocks, hashes, 0, columns)
    return blocks


def test_a_shared_prefix_survives_a_flood_under_segmented_lru_and_not_under_lru() -> None:
    for name, survives in (("lru", False), ("slru", True), ("cost", True)):
        pool = BlockPool(41, eviction_policy=name)
        prefix = held_and_hashed(pool, [0, 1, 2, 3])
        hashes = [pool.block_hash_of(block) for block in prefix.tolist()]
        pool.touch(prefix)
        pool.free_blocks(prefix[::-1])
        pool.free_blocks(prefix[::-1])
        for _ in range(12):
            pool.free_blocks(held_and_hashed(pool, [0, 1, 2, 3])[::-1])
        assert all(block_hash in pool.hash_maps[0] for block_hash in hashes) == survives


def test_a_block_deep_in_a_sequence_costs_more() -> None:
    pool = BlockPool(3, eviction_policy=partial(CostAwarePolicy, attention_parity_tokens=64.0))
    deep, shallow = held_and_hashed(pool, [9, 0]).tolist()
    pool.free_blocks([deep])
    pool.free_blocks([shallow])
    assert pool.get_new_blocks(2).tolist() == [shallow, deep]


def test_a_prefix_outlives_what_stands_on_it_though_it_costs_less() -> None:
    pool = BlockPool(5, eviction_policy=partial(CostAwarePolicy, attention_parity_tokens=1.0))
    chain = held_and_hashed(pool, [0, 1, 2, 3])
    pool.free_blocks(chain[::-1])
    assert pool.get_new_blocks(4).tolist() == chain[::-1].tolist()


def test_what_is_not_hit_again_is_overtaken_in_time() -> None:
    pool = BlockPool(5, eviction_policy="cost")
    (favourite,) = held_and_hashed(pool, [0]).tolist()
    block_hash = pool.block_hash_of(favourite)
    for _ in range(5):
        pool.touch([favourite])
    for _ in range(6):
        pool.free_blocks([favourite])
    for _ in range(40):
        pool.free_blocks(held_and_hashed(pool, [0]))
    assert block_hash not in pool.hash_maps[0]


class MostRecentlyUsed(EvictionPolicy):
    """A user's own: a stack."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self.stack = list(range(self.num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self.stack)

    def take(self, num_blocks: int) -> np.ndarray:
        self.check_available(num_blocks)
        return np.array([self.stack.pop() for _ in range(num_blocks)], np.int64)

    def release(self, ids: np.ndarray) -> None:
        self.stack += ids.tolist()

    def remove(self, ids: np.ndarray) -> None:
        for block_id in ids.tolist():
            self.stack.remove(block_id)

    def order(self) -> np.ndarray:
        return np.array(self.stack[::-1], np.int32)

    def bulk_equivalent(self, flow: StepFlow) -> int:
        return 0


def test_a_policy_of_ones_own_needs_the_abstract_methods_only() -> None:
    pool = BlockPool(6, eviction_policy=MostRecentlyUsed)
    blocks = held_and_hashed(pool, [0, 1, 2])
    pool.free_blocks(blocks)
    pool.touch(blocks[:1])
    assert pool.get_new_block() == blocks[2]
    pool.free_blocks([int(blocks[2])])
    pool.evict_blocks(blocks)
    assert pool.snapshot().policy_state == ()
    assert pool.snapshot().free_order == (3, 2, 4, 5)
    with pytest.raises(BlockStateError, match="block 5 has 0 references"):
        pool.free_blocks([5])
    manager = FULL.manager([9], eviction_policy=MostRecentlyUsed)
    assert isinstance(manager.block_pool.eviction_policy, MostRecentlyUsed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"eviction_policy": "fifo"},
            "expected eviction_policy of probation, learned, lru, slru, cost, or a callable .*, got 'fifo'",
        ),
        (
            {"eviction_policy": None},
            "expected eviction_policy of probation, learned, lru, slru, cost, or a callable .*, got None",
        ),
        ({"eviction_policy": lambda index: index}, "or a callable that makes an EvictionPolicy from HashedBlocks"),
        (
            {"eviction_policy": partial(LearnedPolicy, max_ghosts=0)},
            "expected max_ghosts >= 1, got 0",
        ),
        (
            {"eviction_policy": partial(LearnedPolicy, learn_every=0)},
            "expected learn_every >= 1, got 0",
        ),
        (
            {"eviction_policy": partial(SegmentedLRUPolicy, protected_share=1.5)},
            r"protected_share in \[0, 1\], got 1.5",
        ),
        ({"eviction_policy": partial(SegmentedLRUPolicy, protected_share=-1)}, r"protected_share in \[0, 1\], got -1"),
        (
            {"eviction_policy": partial(CostAwarePolicy, attention_parity_tokens=0)},
            "attention_parity_tokens > 0, got 0",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockPool(4, **options)
    with pytest.raises(ValueError, match=message):
        KVCacheManager(FULL.manager([4]).kv_cache_config, 24, 2, **options)


@pytest.mark.parametrize("name", ["lru", "slru", "cost"])
def test_a_negative_count_is_refused(name: str) -> None:
    policy = make_eviction_policy(name, PrefixIndex(4, (0,)))
    with pytest.raises(ValueError, match="expected num_blocks >= 0, got -1"):
        policy.take(-1)


def spoiled(name: str) -> BlockPool:
    """A pool with blank, cached and protected blocks, a copy that is not checked after the test."""
    pool = BlockPool(30, eviction_policy=name)
    blocks = held_and_hashed(pool, [0, 1, 2, 3])
    pool.touch(blocks[:2])
    pool.free_blocks(blocks[::-1])
    pool.free_blocks(blocks[:2])
    pool.check_invariants()
    return copy.deepcopy(pool)


@pytest.mark.parametrize(
    ("name", "corrupt", "law"),
    [
        ("slru", lambda p: p._was_hit.__setitem__(1, False), "S2: a block of probation counts as hit, or a"),
        ("slru", lambda p: p._was_hit.__setitem__(3, True), "S2: a block of probation counts as hit"),
        ("slru", lambda p: setattr(p, "max_protected", 1), "S2: 2 protected blocks, at most 1 expected"),
        ("slru", lambda p: setattr(p._blank, "num_free_blocks", 9), "Q2: 9 blocks counted as free"),
        ("slru", lambda p: setattr(p._probation, "num_free_blocks", 9), "Q2: 9 blocks counted as free"),
        ("slru", lambda p: setattr(p._protected, "num_free_blocks", 9), "Q2: 9 blocks counted as free"),
        ("slru", lambda p: p._blank.append(p._probation.popleft()), "S1: a blank block is hashed"),
        ("slru", lambda p: p._probation.append(p._blank.popleft()), "S1: a blank block is hashed, or one"),
        ("cost", lambda p: p._blank.append(int(p._cached.pop(1)[0])), "C1: a blank block is hashed"),
        ("cost", lambda p: setattr(p, "_clock", 1e9), "C2: a priority of 16.* is below 1000000000.0"),
        ("cost", lambda p: setattr(p._cached, "num_queued", 3), "O1: 3 blocks counted, 4 have a ticket"),
    ],
)
def test_the_checker_sees_a_broken_policy(name: str, corrupt: Callable[[Any], Any], law: str) -> None:
    pool = spoiled(name)
    corrupt(pool.eviction_policy)
    with pytest.raises(InvariantError, match=law):
        pool.check_invariants()


@pytest.mark.parametrize("num_counted", [2, 4])
def test_the_checker_sees_a_miscounted_pool(num_counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = copy.deepcopy(BlockPool(4, eviction_policy=MostRecentlyUsed))
    monkeypatch.setattr(MostRecentlyUsed, "num_free", property(lambda policy: num_counted))
    with pytest.raises(InvariantError, match=f"P1: {num_counted} blocks counted as free, 3 are"):
        pool.check_invariants()
    monkeypatch.undo()

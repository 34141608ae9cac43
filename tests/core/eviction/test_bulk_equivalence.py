"""`plan_step` equals its calls under every policy; a looser rule than the policies' own would not do."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockPool, CostAwarePolicy, SegmentedLRUPolicy
from kvjax.core.eviction import LearnedPolicy, StepFlow
from kvjax.core.manager.step_planner import StepPlanner
from tests.core.eviction.test_policies import POLICIES as LIVES
from tests.core.eviction.test_policies import MostRecentlyUsed
from tests.core.manager.manager_lockstep import IN_SLABS, SETUPS, Setup
from tests.core.manager.test_step_planner import check_step

POLICIES: dict[str, Any] = {
    "probation": "probation",
    "learned": partial(LearnedPolicy, max_ghosts=6, learn_every=3),
    "slru": "slru",
    "slru_half": partial(SegmentedLRUPolicy, protected_share=0.5),
    "cost": "cost",
    "cost_steep": partial(CostAwarePolicy, attention_parity_tokens=8.0),
    "own": MostRecentlyUsed,
}
OF_LRU = {name: setup for name, setup in SETUPS.items() if not setup.uncached_first}
SOME = {
    name: OF_LRU[name]
    for name in (
        "full",
        "window",
        "window_no_caching",
        "chunked",
        "hybrid",
        "hybrid_sizes",
        "hybrid_pools",
        "full_mamba",
        "hybrid_retained",
    )
}
NUM_SEEDS = 10


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("setup", SOME.values(), ids=SOME)
def test_a_planned_step_equals_its_calls(setup: Setup, policy: Any) -> None:
    for seed in range(NUM_SEEDS):
        check_step(setup, seed, events=seed % 4 == 0, eviction_policy=policy)


@pytest.mark.parametrize("setup", IN_SLABS.values(), ids=IN_SLABS)
def test_a_planned_step_equals_its_calls_in_slabs(setup: Setup) -> None:
    for seed in range(3 * NUM_SEEDS):
        check_step(setup, seed, events=seed % 4 == 0, eviction_policy="learned")


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("setup", IN_SLABS.values(), ids=IN_SLABS)
def test_a_planned_step_equals_its_calls_in_slabs_sweep(setup: Setup) -> None:
    for seed in range(1_000, 4_000):
        check_step(setup, seed, events=seed % 4 == 0, eviction_policy="learned")


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("setup", OF_LRU.values(), ids=OF_LRU)
def test_a_planned_step_equals_its_calls_sweep(setup: Setup, policy: Any) -> None:
    for seed in range(1_000, 4_000):
        check_step(setup, seed, events=seed % 4 == 0, eviction_policy=policy)


@pytest.mark.parametrize("policy", ["slru", "cost"])
def test_steps_are_planned_at_once_where_that_is_right(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    stretch_length = StepPlanner._stretch_length

    def recorded(self: StepPlanner, work: Any) -> int:
        lengths.append((stretch_length(self, work), work.rows.size))
        return lengths[-1][0]

    monkeypatch.setattr(StepPlanner, "_stretch_length", recorded)
    for name in ("full", "window"):
        for seed in range(NUM_SEEDS):
            check_step(SETUPS[name], seed, events=False, eviction_policy=policy)
    assert any(length == rows > 1 for length, rows in lengths)
    assert any(0 < length < rows for length, rows in lengths)
    assert any(length == 0 for length, rows in lengths)


@dataclass(frozen=True)
class ListedFlow:
    """Rows as lists, with what a policy asks of a `StepFlow`."""

    rows: list[tuple[list[int], int]]  # blocks that the row releases, and how many it takes then

    def rows_within(self, num_blocks: int) -> int:
        leads = range(len(self.rows) + 1)
        return max(lead for lead in leads if sum(count for _, count in self.rows[:lead]) <= num_blocks)

    def released(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(block, position) for position, (blocks, _) in enumerate(self.rows) for block in blocks]
        ids, positions = np.array(pairs, np.int64).reshape(-1, 2).T
        return ids, positions

    def rows_before(self, positions: np.ndarray) -> int:
        return min(positions.tolist(), default=len(self.rows))


@pytest.mark.parametrize("name", LIVES)
def test_rows_at_once_get_what_they_get_one_by_one(name: str) -> None:
    """Every lead of random rows that a policy calls equivalent, by the definition."""
    num_whole = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        pool = BlockPool(13, hash_block_size=4, eviction_policy=LIVES[name][0])
        ids = rng.permutation(pool.get_new_blocks(12))
        hashed = ids[: int(rng.integers(13))]
        pool.register_many(hashed, [bytes([block]) for block in hashed.tolist()], 0, rng.integers(0, 9, hashed.size))
        hit = ids[rng.random(12) < 0.3]
        pool.touch(hit)
        pool.free_blocks(hit)
        ids = rng.permutation(ids)
        num_free = int(rng.integers(13))
        pool.free_blocks(ids[:num_free])
        pool.eviction_policy.note_step_planned()
        held, rows = ids[num_free:].tolist(), []
        for _ in range(int(rng.integers(1, 5))):
            num_released = int(rng.integers(3))
            rows.append((held[:num_released], int(rng.integers(5))))
            del held[:num_released]
        flow: Any = ListedFlow(rows)
        num_equal = pool.eviction_policy.bulk_equivalent(flow)
        num_whole += num_equal == len(rows) > 1
        for lead in range(num_equal + 1):
            bulk, single = copy.deepcopy(pool), copy.deepcopy(pool)
            bulk.free_blocks([block for blocks, _ in rows[:lead] for block in blocks])
            at_once = bulk.get_new_blocks(sum(count for _, count in rows[:lead])).tolist()
            one_by_one: list[int] = []
            for blocks, count in rows[:lead]:
                single.free_blocks(blocks)
                one_by_one += single.get_new_blocks(count).tolist()
            assert at_once == one_by_one
            assert bulk.eviction_policy.order().tolist() == single.eviction_policy.order().tolist()
            assert bulk.eviction_policy.state() == single.eviction_policy.state()
    assert num_whole > 10


@pytest.mark.parametrize("policy", ["slru", "cost"])
def test_rows_are_at_once_while_takes_and_releases_of_blank_blocks_do_not_meet(policy: str) -> None:
    """Rows release blank blocks and take fewer than lie blank, or take more than those and release none."""
    pool = BlockPool(13, eviction_policy=policy)
    ids = pool.get_new_blocks(10)
    pool.register_many(ids[:6], [bytes([block]) for block in ids[:6].tolist()], 0, np.arange(6))
    pool.free_blocks(ids[:6])
    blank_released: Any = ListedFlow([(ids[6:7].tolist(), 1), (ids[7:9].tolist(), 0), ([], 1)])  # 2 lie blank
    assert pool.eviction_policy.num_free == 8
    assert pool.eviction_policy.bulk_equivalent(blank_released) == 3
    blank_taken: Any = ListedFlow([([], 1), ([], 4), ([], 2)])
    assert pool.eviction_policy.bulk_equivalent(blank_taken) == 3


def test_segmented_rows_are_at_once_while_takes_end_before_protected_blocks() -> None:
    """Rows that release cached blocks may take blank blocks and probation."""
    pool = BlockPool(13, eviction_policy="slru")
    ids = pool.get_new_blocks(12)
    pool.register_many(ids[:8], [bytes([block]) for block in ids[:8].tolist()], 0, np.arange(8))
    pool.touch(ids[:1])
    pool.free_blocks([ids[0], *ids[:6], *ids[9:]])  # 3 blank, 5 in probation, 1 protected; 6 and 7 are held and hashed
    flow: Any = ListedFlow([([], 2), (ids[6:7].tolist(), 3), (ids[7:8].tolist(), 3), ([], 1)])
    assert pool.eviction_policy.bulk_equivalent(flow) >= 3


@pytest.mark.parametrize("policy", [SegmentedLRUPolicy, CostAwarePolicy])
def test_a_looser_rule_is_wrong(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(self: Any, flow: StepFlow) -> int:
        return flow.rows_within(self.num_free)

    monkeypatch.setattr(policy, "bulk_equivalent", fits)

    def check_many() -> None:
        for name in ("window", "window_no_caching", "hybrid", "hybrid_sizes"):
            for seed in range(40):
                check_step(SETUPS[name], seed, events=False, eviction_policy=policy)

    with pytest.raises(AssertionError):
        check_many()

"""`plan_step` equals its calls under every policy; a looser rule than the policies' own would not do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvjax.core import CostAwarePolicy, SegmentedLRUPolicy
from kvjax.core.eviction import StepFlow
from kvjax.core.manager.step_planner import StepPlanner
from tests.core.eviction.test_policies import MostRecentlyUsed
from tests.core.manager.manager_lockstep import SETUPS, Setup
from tests.core.manager.test_step_planner import check_step

POLICIES: dict[str, Any] = {
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
    )
}
NUM_SEEDS = 10


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("setup", SOME.values(), ids=SOME)
def test_a_planned_step_equals_its_calls(setup: Setup, policy: Any) -> None:
    for seed in range(NUM_SEEDS):
        check_step(setup, seed, events=seed % 4 == 0, eviction_policy=policy)


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

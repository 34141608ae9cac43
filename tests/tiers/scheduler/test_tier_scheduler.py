"""Loads and stores with planted faults: nothing wrong is attended, and nothing leaks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.core.manager.naive_manager import NaiveGroup
from tests.tiers.tiered_world import FAULTS, TieredWorld

SETUPS = {
    "full": (NaiveGroup(2),),
    "hybrid": (NaiveGroup(2), NaiveGroup(2, window=4), NaiveGroup(2, window=4)),
    "pools": (NaiveGroup(2), NaiveGroup(4, window=7, pool=1)),
}

POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"eviction_policy": "lru", "retention_interval": None},
    "probation": {"eviction_policy": "probation", "retention_interval": "auto"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("name", SETUPS)
def test_requests_attend_their_own_kv_alone(name: str, write_through: bool, policy: str) -> None:
    num_loaded = 0
    for seed in range(3):
        world = TieredWorld(SETUPS[name], seed, host_bytes=1_200, write_through=write_through, **POLICIES[policy])
        for _ in range(60):
            world.step()
            world.check_invariants()
        num_loaded += world.num_loaded
        assert world.num_failed == 0
        world.drain()
    assert num_loaded > 5


@pytest.mark.parametrize("write_through", [False, True])
def test_pages_are_stored_before_their_slab_changes_hands(write_through: bool) -> None:
    num_loaded = num_moved = 0
    for seed in range(4):
        options = {"write_through": write_through, "blocks_per_slab": (4, 2), **POLICIES["probation"]}
        world = TieredWorld(SETUPS["pools"], seed, host_bytes=1_200, **options)
        for _ in range(60):
            world.step()
            world.check_invariants()
        num_loaded += world.num_loaded
        num_moved += world.manager.slabs.num_moved
        assert world.num_failed == 0
        world.drain()
    assert num_loaded > 5
    assert num_moved > 5


@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("name", ["hybrid", "pools"])
def test_a_tier_knows_what_blocks_are_worth(name: str, write_through: bool) -> None:
    num_on_probation = num_loaded = 0
    for seed in range(3):
        world = TieredWorld(SETUPS[name], seed, write_through=write_through, **POLICIES["probation"])
        for _ in range(60):
            world.step()
            world.check_worth()
            num_on_probation += sum(worth.on_probation for worth in world.transit.keys.values())
        num_loaded += world.num_loaded
    assert num_on_probation > 5
    assert num_loaded > 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("name", SETUPS)
def test_faults_cost_computation_alone(name: str, write_through: bool, policy: str) -> None:
    """Loads that fail midway or hang, damaged and lost stores, lost reports, aborts: no wrong page, no leak."""
    faults, num_failed = Counter[str](), 0
    for seed in range(7, 17):
        if num_failed > 2 and all(faults[fault] for fault in FAULTS):
            break
        world = TieredWorld(SETUPS[name], seed, write_through=write_through, fault_rate=0.1, **POLICIES[policy])
        for _ in range(120):
            world.step()
            world.check_invariants()
        faults += world.faults
        num_failed += world.num_failed
        world.drain()
    assert all(faults[fault] for fault in FAULTS)
    assert num_failed > 2


@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("name", SETUPS)
def test_what_a_dropped_step_did_not_compute_is_never_stored(name: str, write_through: bool) -> None:
    num_loaded = 0
    for seed in range(3):
        world = TieredWorld(SETUPS[name], seed, host_bytes=1_200, write_through=write_through, drops=True)
        for _ in range(60):
            world.step()
            world.check_invariants()
        num_loaded += world.num_loaded
        world.drain()
    assert num_loaded


@pytest.mark.parametrize("fault_rate", [0.0, 0.1])
@pytest.mark.parametrize("write_through", [False, True])
def test_data_ranks_load_what_another_computed_and_nothing_else(write_through: bool, fault_rate: float) -> None:
    """One host and one disk; a request finds units that its own rank has never computed."""
    first = TieredWorld(SETUPS["pools"], 9, host_bytes=1_200, write_through=write_through, fault_rate=fault_rate)
    second = TieredWorld(SETUPS["pools"], 9, first=first, write_through=write_through, fault_rate=fault_rate)
    for _ in range(300):
        first.step()
        first.check_invariants()
    assert min(first.num_foreign, second.num_foreign) > 2
    assert (first.num_failed + second.num_failed > 0) == (fault_rate > 0)
    first.drain()


def test_no_room_on_the_host_is_no_error() -> None:
    world = TieredWorld(SETUPS["hybrid"], 3, host_bytes=5, fault_rate=0.02)
    for _ in range(60):
        world.step()
        world.check_invariants()
    world.drain()

"""Steps that are planned and not dispatched: nobody hits what they would have computed, and what waits is not lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request, build_step_plan
from kvjax.core.pool.page_edits import NO_COPIES, NO_PAGES
from kvjax.errors import BlockStateError
from tests.core.manager.manager_lockstep import FULL, SETUPS, Setup
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.random_loads import RandomLoads
from tests.core.manager.test_loads import INSIDE, LOADED, SEEDS

HASHER = BlockHasher(2, seed="0")


def request_of(name: str, num_tokens: int = 8, **options: Any) -> Request:
    return Request(name, range(num_tokens), block_hasher=HASHER, **options)


def num_hit(manager: KVCacheManager) -> int:
    return manager.get_computed_blocks(request_of("probe", 20))[1]


def running(manager: KVCacheManager, name: str, num_tokens: int = 8, num_computed: int = 3) -> Request:
    """A request whose first tokens are computed, and whose other ones are planned."""
    request = request_of(name, num_tokens)
    assert manager.allocate_slots(request, num_computed) is not None
    request.num_computed_tokens = num_computed
    assert manager.plan_step([request.row], num_tokens - num_computed).num_planned == 1
    return request


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOADED)
def test_whatever_is_a_hit_is_written(name: str, seed: int) -> None:
    """Random steps, some dropped in whole or in part, before or after the plan is built; loads, preemptions."""
    world = RandomLoads(LOADED[name], seed, drops=True)
    world.run()
    assert world.num_dropped


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", INSIDE)
def test_pages_that_a_dropped_step_was_to_copy_are_copied_by_the_next(name: str, seed: int) -> None:
    setup = replace(SETUPS[name], same_step_hits=False)
    world = RandomLoads(setup, seed, sub_block_hits=True, forks=True, drops=True)
    world.run()
    assert world.num_dropped


def test_who_hit_what_was_dropped_is_dropped_too() -> None:
    manager = FULL.manager([20])
    first, second = running(manager, "first"), request_of("second", 10)
    blocks, length = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 10 - length, length, blocks) is not None
    before = manager.snapshot()
    with pytest.raises(BlockStateError, match="block 2, which the step was to fill, is a hit of another request"):
        manager.take_back_step([first.row])
    assert manager.snapshot() == before
    assert manager.take_back_step([first.row, second.row]) == (second,)
    assert num_hit(manager) == 2


def test_a_pin_does_not_hold_it_up() -> None:
    manager = FULL.manager([40])
    request = running(manager, "r")
    pinned = manager.pin(request_of("pinned", 9))
    assert pinned is not None
    manager.take_back_step([request.row])
    assert num_hit(manager) == 2
    manager.unpin(pinned)


@pytest.mark.parametrize("is_freed", [False, True])
def test_page_edits_of_a_dropped_plan_wait_again(is_freed: bool) -> None:
    """But not those of pages that nobody holds any more."""
    manager = Setup((NaiveGroup(2), NaiveGroup(2, pool=1)), hash_block_size=2).manager([20, 20], zero_new_pages=True)
    parent = running(manager, "parent", num_tokens=4, num_computed=3)
    manager.take_pages_to_zero()
    (child,) = manager.fork(parent, 1) or ()
    manager.plan_step([parent.row, child.row], [1, 1])
    other = running(manager, "other", 3, 1)
    plan = build_step_plan(manager, np.array([parent.row, child.row, other.row]), np.array([1, 1, 2]))
    assert [copies.sources.tolist() for copies in plan.page_copies] == [[2], [2]]
    if is_freed:
        manager.free(parent)
        manager.free(child)
    rows = plan.rows if not is_freed else [other.row]
    manager.take_back_step(rows, plan.page_copies, plan.pages_to_zero)
    manager.check_invariants()
    copies, zeros = manager.take_page_copies(), manager.take_pages_to_zero()
    for one, two in zip(copies, plan.page_copies, strict=True):
        assert one.destinations.tolist() == ([] if is_freed else two.destinations.tolist())
        assert one.sources.tolist() == ([] if is_freed else two.sources.tolist())
    assert [ids.tolist() for ids in zeros] == [ids.tolist() for ids in plan.pages_to_zero]


def test_states_go_back_to_where_they_are() -> None:
    """The next step may pass over columns in which the dropped one had blocks: no state is in those."""
    manager = Setup((NaiveGroup(2, mamba="align", drafts=2),)).manager([30])
    request = running(manager, "r", num_tokens=9, num_computed=2)
    held = 3  # the state, and one for each draft
    manager.take_back_step([request.row])
    assert np.count_nonzero(manager.get_block_ids("r")[0]) == held
    assert manager.plan_step([request.row], 6).num_planned == 1
    ids = manager.get_block_ids("r")[0]
    assert [bool(block_id) for block_id in ids] == [True, False, False, True, True, True]
    assert manager.block_pool.num_hashed_blocks == 2


def test_bad_input() -> None:
    manager = FULL.manager([20])
    request = running(manager, "r")
    before = manager.snapshot()
    edits: list[tuple[Any, Any]] = [((NO_COPIES, NO_COPIES), None), (None, ()), ((), (NO_PAGES,))]
    for copies, zeros in edits:
        with pytest.raises(ValueError, match="expected page edits of 1 pools, got"):
            manager.take_back_step([request.row], copies, zeros)
    with pytest.raises(ValueError, match=r"expected rows in \[0, 1\), got 1 to 1"):
        manager.take_back_step([1])
    with pytest.raises(ValueError, match="expected distinct rows"):
        manager.take_back_step([request.row, request.row])
    assert manager.snapshot() == before
    assert manager.take_back_step([]) == ()
    assert manager.snapshot() == before

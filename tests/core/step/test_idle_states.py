"""States change pools where a request starts from a hit, and where a step leaves one at the end of a block."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request, StepPlan, build_step_plan
from tests.core.manager.manager_lockstep import IDLE
from tests.core.manager.page_contents import PageContents, Writes

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
BLOCK = 4  # tokens of a block of states


def new_request(name: str, num_tokens: int) -> Request:
    return Request(name, range(num_tokens), block_hasher=HASHER)


def manager_of(name: str = "pools_drafts") -> KVCacheManager:
    return IDLE[name].manager([40] * IDLE[name].num_pools)


def moves_of(manager: KVCacheManager, request: Request, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """(sources, destinations) of what a step of a request loads, and of what it stores."""
    plan: StepPlan = build_step_plan(manager, np.array([request.row]), np.array([count]))
    (moves,) = plan.idle_states
    assert (moves.running_pool, moves.idle_pool) == (1, 2)
    loads, stores = [[one.sources.tolist(), one.destinations.tolist()] for one in (moves.loads, moves.stores)]
    return loads, stores


def test_a_step_stores_where_it_ends_a_block_and_a_hit_is_loaded_once() -> None:
    manager = manager_of()
    first = new_request("first", 11)
    for count in (BLOCK, 2, 2, 3):
        assert manager.allocate_slots(first, count) is not None
        loads, stores = moves_of(manager, first, count)
        first.num_computed_tokens += count
        _, (running, *_), idle = manager.get_block_ids("first")
        ends = first.num_computed_tokens % BLOCK == 0
        column = first.num_computed_tokens // BLOCK - 1
        assert loads == [[], []]
        assert stores == ([[running], [idle[column]]] if ends else [[], []])
    manager.new_step_starts()
    second = new_request("second", 11)
    hit, num_hit = manager.get_computed_blocks(second)
    assert num_hit == 2 * BLOCK
    assert manager.allocate_slots(second, 2, num_hit, hit) is not None
    second.num_computed_tokens = num_hit
    _, (running, *_), idle = manager.get_block_ids("second")
    assert moves_of(manager, second, 2) == ([[idle[1]], [running]], [[], []])
    second.num_computed_tokens += 2
    assert manager.allocate_slots(second, 1) is not None
    assert moves_of(manager, second, 1) == ([[], []], [[], []])


def test_a_step_with_drafts_stores_the_state_that_ends_a_block() -> None:
    """One token and two drafts over the end of a block: the state is that before the last draft."""
    manager = manager_of()
    request = new_request("r", 3)
    assert manager.allocate_slots(request, 2) is not None
    request.num_computed_tokens = 2
    assert manager.allocate_slots(request, 3) is not None
    device = PageContents(manager)
    device.pages[1, manager.get_block_ids("r")[1][0]] = {0: (1, None, (0, 1))}
    plan = device.plan([Writes(request, 3, [7, 8])])
    (moves,) = plan.idle_states
    write = plan.groups[1].state_write
    assert write is not None
    assert moves.stores.sources.tolist() == [write[0, 1]]
    assert moves.stores.destinations.tolist() == [manager.get_block_ids("r")[2][0]]


@pytest.mark.parametrize("name", IDLE)
def test_children_of_a_request_that_has_not_run_load_what_it_starts_from(name: str) -> None:
    """Each into a page of its own, whoever runs first."""
    manager = manager_of(name)
    device = PageContents(manager)
    first = new_request("first", 9)
    assert manager.allocate_slots(first, 8) is not None
    device.run([Writes(first, 8)])
    manager.new_step_starts()
    parent = new_request("parent", 9)
    hit, num_hit = manager.get_computed_blocks(parent)
    assert num_hit == 8
    assert manager.allocate_slots(parent, 1, num_hit, hit) is not None
    parent.num_computed_tokens = num_hit
    children = manager.fork(parent, 2)
    assert children is not None
    for request in (children[0], parent, children[1]):
        assert manager.plan_step([request.row], [1]).num_planned == 1
        device.run([Writes(request, 1)])
        request.num_computed_tokens += 1
        device.check(request, 9)


def test_a_request_that_starts_inside_a_block_is_refused() -> None:
    """Nobody has such a state in the idle pool; no page edits are taken."""
    manager = manager_of()
    request = new_request("r", 11)
    assert manager.allocate_slots(request, 2, num_external_computed_tokens=6, delay_cache_blocks=True) is not None
    request.num_computed_tokens = 6
    with pytest.raises(ValueError, match=r"row 0: expected to start where a block of 4 tokens ends, .* got 6 computed"):
        build_step_plan(manager, np.array([request.row]), np.array([2]))

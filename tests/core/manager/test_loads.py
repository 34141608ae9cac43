"""External tokens: their pages are never zeroed, whenever a connector writes them, and nobody else's are left."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import Request, build_step_plan
from kvjax.errors import UnknownRequestError
from tests.core.manager.manager_lockstep import IDLE, IN_SLABS, SETUPS, Setup
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.random_loads import RandomLoads

LOADED = {name: setup for name, setup in SETUPS.items() if not any(g.cross for g in setup.groups) and setup.caching}
LOADED |= {f"{name}_in_slabs": setup for name, setup in IN_SLABS.items()}
LOADED |= {f"idle_{name}": setup for name, setup in IDLE.items()}
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 20))]
INSIDE = ["full_coarse", "window", "window_1", "mla_window", "hybrid", "hybrid_pools", "full_chunked"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOADED)
def test_everyone_attends_to_what_was_loaded(name: str, seed: int) -> None:
    """Loads that come early, late, or not at all; beside what was loaded no page holds what others left."""
    world = RandomLoads(LOADED[name], seed)
    world.run()
    assert world.num_loaded


def test_a_connector_may_write_before_the_step_is_planned() -> None:
    manager = Setup((NaiveGroup(4),), hash_block_size=4).manager([20], zero_new_pages=True)
    request = Request("r", range(10))
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    request.num_computed_tokens = 8
    manager.cache_blocks(request, 8)
    assert manager.allocate_slots(request, 2) is not None
    plan = build_step_plan(manager, np.array([request.row]), np.array([2]))
    assert [ids.tolist() for ids in plan.pages_to_zero] == [[3]]


def test_pages_of_new_tokens_and_of_states_of_drafts_are_zeroed() -> None:
    """A block that a load fills in part is not, nor are null blocks before a window."""
    groups = (NaiveGroup(4), NaiveGroup(4, window=2, first=2), NaiveGroup(4, mamba="align", drafts=2))
    manager = Setup(groups, hash_block_size=4).manager([40], zero_new_pages=True)
    request = Request("r", range(20))
    loaded = {"num_external_computed_tokens": 10, "num_lookahead_tokens": 4}
    assert manager.allocate_slots(request, 2, **loaded) is not None
    full, window, states = manager.get_block_ids("r")
    assert [bool(block_id) for block_id in window] == [True, False, True, True]
    assert [bool(block_id) for block_id in states] == [False, False, True, True, True]
    expected = [full[3], window[3], *states[3:]]
    assert [ids.tolist() for ids in manager.take_pages_to_zero()] == [sorted(expected)]


def test_what_can_not_be_left_unregistered_is_refused() -> None:
    manager = Setup((NaiveGroup(4),), hash_block_size=4).manager([40])
    request = Request("r", range(10))
    with pytest.raises(UnknownRequestError, match="expected a request that runs here"):
        manager.leave_unregistered(request, 0, 4)
    assert manager.allocate_slots(request, 10) is not None
    before = manager.snapshot()
    for group_id, num_tokens, message in [
        (1, 4, r"expected group_id in \[0, 1\), got 1"),
        (0, 13, r"group 0: expected num_tokens in \[0, 12\], got 13"),
        (0, -1, "expected num_tokens >= 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            manager.leave_unregistered(request, group_id, num_tokens)
    assert manager.snapshot() == before

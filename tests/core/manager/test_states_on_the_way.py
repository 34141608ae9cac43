"""States that a step leaves on its way: hits find them, whoever goes on from them reads them, and steps are fewer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request, build_step_plan
from tests.core.manager.manager_lockstep import Setup
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.random_loads import RandomLoads
from tests.core.manager.test_loads import SEEDS
from tests.core.manager.test_shared_prompts import HASHER, MODELS, manager_of


@dataclass(frozen=True)
class OnTheWay(Setup):
    """Steps leave at most three states."""

    def manager(self, pool_sizes: list[int], **options: Any) -> KVCacheManager:
        return super().manager(pool_sizes, **{"eviction_policy": "probation", "checkpoints_in_step": 3} | options)


TWO_POOLS = (NaiveGroup(2), NaiveGroup(2, mamba="align", pool=1), NaiveGroup(2, mamba="align", pool=1))
WORLDS = {
    "one_pool": OnTheWay((NaiveGroup(2), NaiveGroup(2, mamba="align")), retention=0, same_step_hits=False),
    "two_pools": OnTheWay(TWO_POOLS, retention=4, same_step_hits=False),
    "sizes": OnTheWay((NaiveGroup(2), NaiveGroup(4, mamba="align", pool=1)), retention=4, same_step_hits=False),
    "alone": OnTheWay((NaiveGroup(2, mamba="align"),), retention=0, same_step_hits=False),
    "slabs": OnTheWay(TWO_POOLS, retention=0, same_step_hits=False, blocks_per_slab=(4, 1)),
}


@pytest.mark.parametrize("drops", [False, True], ids=["", "drops"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WORLDS)
def test_requests_read_their_own_states(name: str, seed: int, drops: bool) -> None:
    """Random lives, with forks, preemptions and steps that are taken back."""
    world = RandomLoads(WORLDS[name], seed, drops=drops, forks=name != "slabs" and not drops)
    for _ in range(12 if name == "sizes" else 3):  # blocks of 4 tokens are seldom passed over
        world.run()
    assert world.device.num_on_the_way


def steps_of(manager: KVCacheManager, num_tokens: int, budget: int = 8_192) -> list[tuple[int, list[int]]]:
    """Tokens of each step of a prompt, and after how many of them a state is left on the way."""
    request, steps = Request("r", range(num_tokens), block_hasher=HASHER), []
    while left := request.num_tokens - request.num_computed_tokens:
        count = manager.limit_step(request, min(left, budget))
        assert manager.allocate_slots(request, count) is not None
        plan = build_step_plan(manager, np.array([request.row]), np.array([count]))
        (ends,) = {tuple(g.checkpoint_ends[0].tolist()) for g in plan.groups if g.checkpoint_ends is not None} or {()}
        steps.append((count, [end for end in ends if end]))
        request.num_computed_tokens += count
        manager.new_step_starts()
    return steps


def hybrid(most: int) -> KVCacheManager:
    manager = manager_of(MODELS[0], use_eagle=False, max_len=40_000)
    return KVCacheManager(manager.kv_cache_config, 40_000, 16, replace(manager.options, checkpoints_in_step=most))


def test_a_prompt_takes_as_few_steps_as_its_tokens_do() -> None:
    assert [count for count, _ in steps_of(hybrid(0), 9_000, 16_384)] == [2_048, 2_048, 4_096, 512, 288, 8]
    assert steps_of(hybrid(4), 9_000, 16_384) == [(9_000, [2_048, 4_096, 8_192, 8_992])]
    assert steps_of(hybrid(3), 9_000, 16_384) == [(8_992, [2_048, 4_096, 8_192]), (8, [])]
    assert steps_of(hybrid(4), 9_000) == [(8_192, [2_048, 4_096]), (808, [800])]
    assert steps_of(hybrid(4), 9_000, 3_000) == [(2_560, [2_048]), (2_560, [1_536]), (2_560, []), (1_320, [512, 1_312])]


def test_without_room_states_are_left_out_and_nobody_waits() -> None:
    groups = (NaiveGroup(2), NaiveGroup(2, mamba="align", pool=1))
    manager = OnTheWay(groups, retention=0).manager([40, 2])
    assert steps_of_small(manager) == [(11, [])]
    manager = OnTheWay(groups, retention=0).manager([40, 3])
    assert steps_of_small(manager) == [(11, [10])]


def steps_of_small(manager: KVCacheManager) -> list[tuple[int, list[int]]]:
    request = Request("r", range(11), block_hasher=BlockHasher(2, "xxhash_cbor", seed="0"))
    count = manager.limit_step(request, 11)
    assert manager.allocate_slots(request, count) is not None
    plan = build_step_plan(manager, np.array([request.row]), np.array([count]))
    ends = plan.groups[1].checkpoint_ends
    assert ends is not None
    return [(count, [end for end in ends[0].tolist() if end])]


def test_drafts_have_columns_of_their_own_so_steps_end_at_checkpoints() -> None:
    groups = (NaiveGroup(2), NaiveGroup(2, mamba="align", pool=1, drafts=2))
    manager = OnTheWay(groups, retention=0).manager([40, 20])
    request = Request("r", range(11), block_hasher=BlockHasher(2, "xxhash_cbor", seed="0"))
    assert manager.limit_step(request, 11) == 10


@pytest.mark.parametrize("most", [-1, 1.5, "3"])
def test_bad_numbers_are_refused(most: Any) -> None:
    with pytest.raises(ValueError, match="expected checkpoints_in_step"):
        Setup((NaiveGroup(2),)).manager([9], checkpoints_in_step=most)

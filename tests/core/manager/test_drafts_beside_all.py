"""Drafts beside all else: named checkpoints, forks, loads, preemptions, dropped steps, slabs and idle states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvjax.core import KVCacheManager
from tests.core.manager.manager_lockstep import IDLE, Setup
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.random_loads import RandomLoads
from tests.core.manager.test_loads import SEEDS


@dataclass(frozen=True)
class OnProbation(Setup):
    """States on the way where there are no drafts; idle states wait on probation."""

    def manager(self, pool_sizes: list[int], **options: Any) -> KVCacheManager:
        return super().manager(pool_sizes, **{"eviction_policy": "probation", "checkpoints_in_step": 3} | options)


def states(block_size: int, drafts: int, pool: int = 0) -> NaiveGroup:
    return NaiveGroup(block_size, mamba="align", drafts=drafts, pool=pool)


FULL = NaiveGroup(2)
WORLDS = {  # answers keep a state every `retention` tokens: in every block, or every few of them
    "blocks": OnProbation((FULL, states(2, 1, pool=1)), retention=2, same_step_hits=False),
    "units": OnProbation((FULL, states(2, 2)), retention=4, same_step_hits=False, max_model_len=28),
    "long_units": OnProbation((FULL, states(2, 3, pool=1)), retention=8, same_step_hits=False, max_model_len=36),
    "last_alone": OnProbation((FULL, states(2, 3, pool=1)), retention=0, same_step_hits=False, max_model_len=36),
    "alone": OnProbation((states(2, 2),), retention=4, max_model_len=28),
    "sizes": OnProbation((NaiveGroup(4), states(2, 3), states(6, 3, pool=1)), retention=12, max_model_len=36),
    "window": OnProbation((NaiveGroup(2, window=5), states(2, 3, pool=1)), retention=6, max_model_len=36),
    "lru": Setup((FULL, states(2, 3)), retention=6, uncached_first=True, max_model_len=28),
    "eagle": OnProbation((FULL, states(2, 2)), retention=4, eagle=True, max_model_len=28),
    "in_flight": OnProbation((FULL, states(2, 2)), retention=4, max_in_flight=4, max_model_len=28),
    "slabs": OnProbation((FULL, states(2, 2, pool=1)), retention=4, blocks_per_slab=(4, 1), max_model_len=36),
    "slabs_sizes": OnProbation(
        (NaiveGroup(4), NaiveGroup(2, window=3), states(2, 3, pool=1), states(4, 3, pool=2)),
        retention=8,
        blocks_per_slab=(3, 2, 1),
        max_model_len=36,
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drops", [False, True], ids=["", "drops"])
@pytest.mark.parametrize("name", [*WORLDS, *(f"idle_{name}" for name in ("pools_drafts", "slabs_retained"))])
def test_requests_read_their_own_and_hits_are_what_they_say(name: str, drops: bool, seed: int) -> None:
    setup = IDLE[name.removeprefix("idle_")] if name.startswith("idle_") else WORLDS[name]
    most_drafts = max(group.drafts for group in setup.groups)
    world = RandomLoads(setup, seed, drops=drops, forks=not drops, names=True, most_drafts=most_drafts)
    for _ in range(3):
        world.run()
    assert world.num_rejected

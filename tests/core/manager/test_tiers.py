"""Blocks beyond the pools: told of before they are reused, found behind a hit, loaded into pages of their own."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import CacheTier, KVCacheManager, Request
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.toy_tier import HASHER, TieredWorld, ToyTier

SETUPS = {
    "full": (NaiveGroup(2),),
    "window": (NaiveGroup(2, window=5),),
    "hybrid": (NaiveGroup(2), NaiveGroup(2, window=4), NaiveGroup(2, window=4)),
    "sizes": (NaiveGroup(4), NaiveGroup(2, window=6)),
    "pools": (NaiveGroup(2), NaiveGroup(4, window=7, pool=1)),
}


@pytest.mark.parametrize("options", [{}, {"use_eagle": True}], ids=str)
@pytest.mark.parametrize("name", SETUPS)
def test_what_is_loaded_is_what_was_computed(name: str, options: dict[str, object]) -> None:
    num_loaded = 0
    for seed in range(4):
        world = TieredWorld(SETUPS[name], 60, seed, **options)
        for _ in range(60):
            world.step()
            for request in world.running:
                world.check(request)
        num_loaded += world.num_loaded
    assert num_loaded > 10


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("name", SETUPS)
def test_a_hit_reaches_as_far_as_pool_and_tier_together(name: str, eagle: bool) -> None:
    """The oracle tries every length, from what each kind's mask sees."""
    longer = 0
    for seed in range(4):
        world = TieredWorld(SETUPS[name], 40, seed, most=20, use_eagle=eagle)
        for _ in range(60):
            world.step()
            world.manager.new_step_starts()
            world.tier.trim()
            probe = world.request(40)
            hit, num_hit = world.manager.get_computed_blocks(probe)
            found = 0 if hit.elsewhere is None else hit.elsewhere.num_tokens
            assert num_hit + found == world.reach(probe, num_hit, eagle)
            longer += found > 0
    assert longer > 3


def computed(manager: KVCacheManager, name: str, tokens: range) -> Request:
    request = Request(name, tokens, block_hasher=HASHER)
    hit, length = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens) - length, length, hit) is not None
    request.num_computed_tokens = len(tokens)
    return request


class Telling:
    """Notes what it is told, and holds nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, bytes, int]] = []

    def before_reuse(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: list[bytes], group_ids: np.ndarray
    ) -> None:
        self.told += [
            (pool_id, block_id, block_hash, group_id)
            for block_id, block_hash, group_id in zip(block_ids.tolist(), block_hashes, group_ids.tolist(), strict=True)
        ]

    def after_register(self, pool_id: int, block_ids: np.ndarray, block_hashes: list[bytes], group_id: int) -> None: ...

    def holds(self, block_hashes: list[bytes], group_id: int) -> np.ndarray:
        return np.zeros(len(block_hashes), bool)


def test_only_reuse_is_told_and_before_the_hash_is_forgotten() -> None:
    tier = Telling()
    manager = KVCacheManager(config_of([NaiveGroup(2), NaiveGroup(2, pool=1)], [4, 5]), 20, 2, tier=tier)
    first = computed(manager, "first", range(6))
    hashes = list(first.block_hashes)
    manager.free(first)
    manager.evict_blocks([3])  # dropped, not reused
    assert tier.told == []
    computed(manager, "other", range(20, 24))  # two blocks of each pool: 3 and 2, the fresh one and 3
    assert tier.told == [(0, 2, hashes[1], 0), (1, 3, hashes[2], 1)]


def test_a_lookup_without_a_tier_says_nothing_of_other_places() -> None:
    manager = KVCacheManager(config_of([NaiveGroup(2)], [9]), 20, 2)
    computed(manager, "a", range(9))
    hit, _ = manager.get_computed_blocks(Request("b", range(9), block_hasher=HASHER))
    assert hit.elsewhere is None
    assert manager.get_computed_blocks(Request("c", range(30, 39)))[0] is manager.empty_kv_cache_blocks
    assert [pool.tier_link for pool in manager.block_pools] == [None]


def test_a_tier_is_no_part_of_a_saved_state() -> None:
    tier: CacheTier = ToyTier()
    world = TieredWorld(SETUPS["hybrid"], 60, 0)
    for _ in range(20):
        world.step()
    state = world.manager.save_state()
    alone = KVCacheManager.restore(state)
    assert alone.snapshot() == world.manager.snapshot()
    assert [pool.tier_link for pool in alone.block_pools] == [None]
    again = KVCacheManager.restore(state, tier=tier)
    assert again.snapshot() == world.manager.snapshot()
    assert [pool.tier_link is not None for pool in again.block_pools] == [True]

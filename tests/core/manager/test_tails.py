"""Full blocks behind the longest hit that a request leaves: no hit can use them, so they go before all that lasts."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.prefill import compute_prompt

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
SIZE = 16  # of a block of states: hits are multiples
GROUPS = [NaiveGroup(2), NaiveGroup(SIZE, pool=1, mamba="align")]
WITH_DRAFTS = [NaiveGroup(2, eagle=True), NaiveGroup(SIZE, pool=1, mamba="align")]


def make(groups: list[NaiveGroup] = GROUPS) -> KVCacheManager:
    eagle = any(group.eagle for group in groups)
    return KVCacheManager(config_of(groups, [400, 40]), 96, 2, use_eagle=eagle)


def request(name: str, num_tokens: int) -> Request:
    """A prompt that begins as all others do."""
    return Request(name, range(num_tokens), block_hasher=HASHER)


def run(manager: KVCacheManager, num_tokens: int) -> Request:
    """Computed and held."""
    manager.new_step_starts()
    compute_prompt(manager, held := request("a", num_tokens), 96)
    manager.new_step_starts()
    return held


def on_probation(manager: KVCacheManager) -> np.ndarray:
    """Blocks of the group that keeps every token."""
    return np.array(manager.block_pools[0].eviction_policy.state()[1], np.int64)


@pytest.mark.parametrize("num_tokens", [*range(SIZE - 1, 2 * SIZE + 3), 5 * SIZE - 1])
@pytest.mark.parametrize("groups", [GROUPS, WITH_DRAFTS], ids=["plain", "drafts"])
def test_what_no_hit_needs_is_on_probation_and_nothing_else(groups: list[NaiveGroup], num_tokens: int) -> None:
    """Without it the same prompt and a longer one hit what they hit with it; without one block more they do not."""
    manager = make(groups)
    manager.free(run(manager, num_tokens))
    pool, tail = manager.block_pools[0], on_probation(manager)
    order = pool.eviction_policy.order()
    kept = np.setdiff1d(order[pool.is_hashed[order]], tail)

    def hits() -> list[int]:
        lengths = num_tokens, num_tokens + 2 * SIZE
        return [manager.get_computed_blocks(request("b", length))[1] for length in lengths]

    before = hits()
    pool.evict_blocks(tail)
    assert hits() == before
    if kept.size:
        pool.evict_blocks(kept[-1:])  # ids ascend with places
        assert hits() < before
    manager.check_invariants()


@pytest.mark.parametrize("groups", [GROUPS, WITH_DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("num_tokens", range(SIZE, 3 * SIZE))
def test_a_longer_request_keeps_the_blocks_that_a_shorter_one_computes_again(
    groups: list[NaiveGroup], num_tokens: int
) -> None:
    manager = make(groups)
    manager.free(run(manager, 3 * SIZE + 5))
    longest = manager.get_computed_blocks(request("b", 3 * SIZE + 5))[1]
    manager.free(run(manager, num_tokens))
    manager.block_pools[0].evict_blocks(on_probation(manager))
    assert manager.get_computed_blocks(request("c", 3 * SIZE + 5))[1] == longest > 0
    manager.check_invariants()


def test_blocks_that_a_fork_holds_last() -> None:
    """It may go on to where a hit ends."""
    manager = make()
    held = run(manager, SIZE + 7)
    fork = manager.fork(held, 1)[0]
    manager.free(held)
    assert on_probation(manager).size == 0
    manager.free(fork)
    assert on_probation(manager).size == 3
    manager.check_invariants()


def test_hits_of_every_block_leave_no_tail() -> None:
    manager = make([NaiveGroup(2), NaiveGroup(2, pool=1, window=9)])
    manager.free(run(manager, 41))
    assert on_probation(manager).size == 0

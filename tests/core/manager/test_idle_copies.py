"""Blocks that are computed again because a checkpoint behind them was gone: what they stood beside is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.prefill import compute_prompt

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
HYBRIDS = {
    "state": [NaiveGroup(2), NaiveGroup(4, mamba="align")],
    "window": [NaiveGroup(2), NaiveGroup(2, window=9)],
    "chunk": [NaiveGroup(2), NaiveGroup(2, chunk=64)],
}
PROMPT = range(41)


def make(hybrid: str, num_blocks: int = 400) -> KVCacheManager:
    return KVCacheManager(config_of(HYBRIDS[hybrid], [num_blocks]), 96, 2)


def run(manager: KVCacheManager, name: str, tokens: range = PROMPT) -> Request:
    """A prompt, computed and held."""
    request = Request(name, tokens, block_hasher=HASHER)
    manager.new_step_starts()
    compute_prompt(manager, request, 96)
    return request


def lose_checkpoints(manager: KVCacheManager) -> None:
    """Forgets what the group that forgets has cached."""
    pool = manager.block_pool
    cached = np.flatnonzero(pool.is_hashed)
    pool.evict_blocks([block for block in cached.tolist() if pool.group_of(block) == 1])


def copies(manager: KVCacheManager) -> list[tuple[int, ...]]:
    """Blocks of each hash of the group that keeps every token, where there are several."""
    blocks = manager.block_pool.prefix_index.snapshot()[0].values()
    return [of_hash for of_hash in blocks if len(of_hash) > 1]


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_idle_blocks_that_were_computed_again_are_forgotten(hybrid: str) -> None:
    """And are as free as blocks that never held anything; what a lookup finds stays."""
    manager = make(hybrid)
    manager.free(run(manager, "a"))
    num_cached = manager.block_pool.num_hashed_blocks
    lose_checkpoints(manager)
    again = run(manager, "b")
    assert len(copies(manager)) == len(PROMPT) // 2
    manager.free(again)
    assert (copies(manager), manager.block_pool.num_hashed_blocks) == ([], num_cached)
    assert manager.get_computed_blocks(Request("c", PROMPT, block_hasher=HASHER))[1] == 40
    manager.check_invariants()


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_blocks_that_a_request_holds_are_not_forgotten(hybrid: str) -> None:
    """Nor are those that a request shares with it."""
    manager = make(hybrid)
    first = run(manager, "a")
    lose_checkpoints(manager)
    second = run(manager, "b")
    manager.free(second)
    assert len(copies(manager)) == len(PROMPT) // 2
    manager.free(first)
    assert manager.get_computed_blocks(Request("c", PROMPT, block_hasher=HASHER))[1] == 40
    manager.check_invariants()


def test_vllms_rules_keep_copies() -> None:
    """They are least recently used, and go in turn."""
    manager = KVCacheManager(config_of(HYBRIDS["window"], [400]), 96, 2, eviction_policy="lru", retention_interval=0)
    manager.free(run(manager, "a"))
    lose_checkpoints(manager)
    manager.free(run(manager, "b"))
    assert len(copies(manager)) == len(PROMPT) // 2

"""A hit is good for `allocate_slots` only while each of its blocks holds the request's own tokens, in its own group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheBlocks, KVCacheManager, Request
from kvjax.errors import BlockStateError
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

HASHER = BlockHasher(2, seed="test")
GONE = "block .* of the hit is no longer cached with these tokens; look it up again"


def make_manager(num_blocks: int, *groups: NaiveGroup, **options: Any) -> KVCacheManager:
    return KVCacheManager(config_of(list(groups), [num_blocks]), 40, 2, **options)


def request_of(name: str, tokens: list[int], **options: Any) -> Request:
    return Request(name, tokens, **{"block_hasher": HASHER, **options})


def compute(manager: KVCacheManager, name: str, tokens: list[int]) -> Request:
    request = request_of(name, tokens)
    hit, length = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens) - length, length, hit) is not None
    request.num_computed_tokens = len(tokens)
    manager.new_step_starts()
    return request


def refused(manager: KVCacheManager, request: Request, hit: KVCacheBlocks, length: int, message: str = GONE) -> None:
    before = manager.snapshot()
    with pytest.raises(BlockStateError, match=message):
        manager.allocate_slots(request, request.num_tokens - length, length, hit)
    assert manager.snapshot() == before
    assert request.row < 0


@pytest.mark.parametrize(
    ("num_blocks", "groups"),
    [
        (9, (NaiveGroup(2),)),
        (5, (NaiveGroup(4),)),
        (17, (NaiveGroup(2), NaiveGroup(2))),
        (13, (NaiveGroup(2), NaiveGroup(4, window=6))),
    ],
    ids=["full", "coarse", "two groups", "window"],
)
def test_blocks_that_cache_other_tokens_by_now_are_refused(num_blocks: int, groups: tuple[NaiveGroup, ...]) -> None:
    manager = make_manager(num_blocks, *groups)
    manager.free(compute(manager, "first", list(range(9))))
    request = request_of("late", list(range(9)))
    hit, length = manager.get_computed_blocks(request)
    assert length == 8
    manager.free(compute(manager, "other", list(range(20, 36))))  # reuses and registers all of them
    assert all(manager.block_pool.is_hashed[ids[ids > 0]].all() for ids in hit.block_ids)
    refused(manager, request, hit, length)


def test_a_block_of_the_same_tokens_in_another_group_is_refused() -> None:
    """The KV of two layers differs where their tokens do not."""
    manager = make_manager(20, NaiveGroup(2), NaiveGroup(2))
    compute(manager, "first", list(range(9)))
    request = request_of("late", list(range(9)))
    hit, length = manager.get_computed_blocks(request)
    swapped = manager.create_kv_cache_blocks([hit.block_ids[1].tolist(), hit.block_ids[0].tolist()])
    refused(manager, request, swapped, length)
    assert manager.allocate_slots(request, 1, length, hit) is not None


def test_a_hit_in_another_order_is_refused() -> None:
    manager = make_manager(20, NaiveGroup(2))
    compute(manager, "first", list(range(9)))
    request = request_of("late", list(range(9)))
    hit, length = manager.get_computed_blocks(request)
    refused(manager, request, manager.create_kv_cache_blocks([hit.block_ids[0][::-1].tolist()]), length)


def test_a_block_that_was_computed_anew_in_this_step_is_refused() -> None:
    """Without `same_step_hits` its KV is not there yet, though its hash is right."""
    manager = make_manager(9, NaiveGroup(2), same_step_hits=False)
    manager.free(compute(manager, "first", list(range(9))))
    request = request_of("late", list(range(9)))
    hit, length = manager.get_computed_blocks(request)
    manager.evict_blocks(hit.block_ids[0])
    again = request_of("again", list(range(9)))
    assert manager.allocate_slots(again, 9) is not None
    both = manager.create_kv_cache_blocks([manager.get_block_ids("again")[0][:4]])
    refused(manager, request, both, length)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1, length, both) is not None


def test_a_request_without_hashes_has_no_hit() -> None:
    manager = make_manager(20, NaiveGroup(2))
    compute(manager, "first", list(range(9)))
    hit, length = manager.get_computed_blocks(request_of("late", list(range(9))))
    bare, before = request_of("bare", list(range(9)), block_hasher=None), manager.snapshot()
    with pytest.raises(ValueError, match="expected a hit of at most the 0 blocks that the request has hashes of"):
        manager.allocate_slots(bare, 1, length, hit)
    assert manager.snapshot() == before


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3, 4, 5, 9], [0, 1, 2, 9]])
def test_a_block_that_begins_with_other_tokens_by_now_is_refused(tokens: list[int]) -> None:
    manager = make_manager(4, NaiveGroup(4), sub_block_hits=True, same_step_hits=False)
    manager.free(compute(manager, "first", list(range(8))))
    request = request_of("late", tokens)
    hit, length = manager.get_computed_blocks(request)
    assert length == len(tokens) - 1
    twin = KVCacheManager.restore(manager.save_state())
    mine = twin.create_kv_cache_blocks([ids.tolist() for ids in hit.block_ids])
    assert twin.allocate_slots(request_of("late", tokens), 1, length, mine) is not None
    manager.free(compute(manager, "other", list(range(20, 32))))
    refused(manager, request, hit, length)


@pytest.mark.parametrize("seed", range(30))
def test_a_hit_is_taken_exactly_where_a_new_lookup_could_give_it(seed: int) -> None:
    """The oracle: every block of the hit is one that the hash map of its group still has under the request's hash."""
    rng = np.random.default_rng(seed)
    manager = make_manager(14, NaiveGroup(2), NaiveGroup(2))
    for i in range(30):
        tokens = rng.integers(0, 2, 9).tolist()
        request = request_of(f"r{i}", tokens)
        hit, length = manager.get_computed_blocks(request)
        for j in range(int(rng.integers(0, 3))):
            manager.free(compute(manager, f"other{i}.{j}", rng.integers(0, 2, 9).tolist()))
        maps = manager.block_pool.hash_maps
        good = all(
            block_id in maps[group_id].snapshot().get(block_hash, ())
            for group_id, ids in enumerate(hit.block_ids)
            for block_id, block_hash in zip(ids.tolist(), request.block_hashes, strict=False)
        )
        if good:
            assert manager.allocate_slots(request, 9 - length, length, hit) is not None
            manager.free(request)
        else:
            refused(manager, request, hit, length)

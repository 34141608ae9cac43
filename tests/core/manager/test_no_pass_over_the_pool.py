"""What is asked every step, or at every admission, reads counters: the arrays over all blocks are taken away here."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.errors import InvariantError
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

HASHER = BlockHasher(2, seed="test")


def make_manager(**options: Any) -> KVCacheManager:
    return KVCacheManager(config_of([NaiveGroup(2)], [20]), 12, 2, **options)


def computed(manager: KVCacheManager, name: str, num_tokens: int) -> Request:
    request = Request(name, range(num_tokens), block_hasher=HASHER)
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    return request


def test_free_blocks_that_are_cached_are_counted() -> None:
    manager = make_manager()
    pool, request = manager.block_pool, computed(manager, "a", 9)
    assert pool.num_cached_free_blocks == 0
    manager.free(request)
    assert pool.num_cached_free_blocks == 4  # the fifth is not full
    hit = manager.get_computed_blocks(other := Request("b", range(7), block_hasher=HASHER))
    assert manager.allocate_slots(other, 1, hit[1], hit[0]) is not None
    assert pool.num_cached_free_blocks == 1
    pool.evict_blocks([1, 4])  # one that is held, one that is free
    assert pool.num_cached_free_blocks == 0
    manager.free(other)
    assert pool.num_cached_free_blocks == 2
    assert manager.reset_prefix_cache()
    assert pool.num_cached_free_blocks == 0


def test_the_checker_finds_a_wrong_number() -> None:
    manager = make_manager()
    manager.free(computed(manager, "a", 9))
    manager.block_pool.num_cached_free_blocks += 1
    with pytest.raises(InvariantError, match="P4: 5 free blocks counted as cached, 4 are"):
        manager.check_invariants()
    manager.block_pool.num_cached_free_blocks -= 1


def test_an_admission_by_worst_case_looks_at_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(reserve=True)
    assert manager.pin(computed(manager, "a", 5)) is not None
    assert manager.reservations is not None
    with monkeypatch.context() as patch:
        patch.setattr(manager.block_pool.outside_refs, "counts", None)
        assert manager.reservations.admits([19 - 6 - 2])  # "a" may have 6 blocks, and 2 are pinned
        assert not manager.reservations.admits([19 - 6 - 2 + 1])


def test_pages_to_zero_are_those_of_new_blocks_alone() -> None:
    manager = make_manager(zero_new_pages=True)
    request = computed(manager, "a", 5)
    assert [ids.tolist() for ids in manager.take_pages_to_zero()] == [[1, 2, 3]]
    assert [ids.tolist() for ids in manager.take_pages_to_zero()] == [[]]
    for _ in range(100):  # dealt again and again, and nobody takes them
        manager.free(request)
        request.num_computed_tokens = 0
        assert manager.allocate_slots(request, 5) is not None
    assert len(manager.block_pool.page_edits.snapshot().pages_to_zero) <= 19

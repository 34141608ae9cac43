"""A hash is told with its first block and again with its last: a reader that counts and one that does not agree."""

from __future__ import annotations

import pytest

from kvjax.core import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.events.first_and_last import FirstAndLast
from tests.events.test_cached_blocks import counts, stored, told_blocks
from tests.events.workload import SETUPS, Workload, cached_blocks, make_manager


class PlainReader:
    """As Dynamo's indexer: stored is there, removed is gone."""

    def __init__(self) -> None:
        self.there: set[tuple[int, bytes]] = set()

    def read(self, event: KVCacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.there.clear()
            return
        keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        self.there = self.there | keys if isinstance(event, BlockStored) else self.there - keys


def check_steps(work: Workload) -> int:
    """Both readers after each of 100 steps; the number of blocks that were not told."""
    told_once, reader = FirstAndLast(), PlainReader()
    told: list[KVCacheEvent] = []
    every: list[KVCacheEvent] = []
    for _ in range(100):
        work.step()
        events = work.manager.take_events()
        every += events
        for event in told_once.told(events):
            told.append(event)
            reader.read(event)
        cached = {(group_id, h) for group_id, hashes in cached_blocks(work.manager).items() for h in hashes}
        assert reader.there == cached
        assert counts(told) == dict.fromkeys(cached, 1)
    assert told_blocks(told) == told_blocks(every)
    return num_stored(every) - num_stored(told)


def num_stored(events: list[KVCacheEvent]) -> int:
    return sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))


@pytest.mark.parametrize("name", SETUPS)
def test_both_readers_know_what_is_cached_after_each_step(name: str) -> None:
    works = [Workload(make_manager(SETUPS[name], 30), seed, ("a", None)) for seed in range(6)]
    assert sum(check_steps(work) for work in works), "no hash had two blocks"


A, B, C, D = (bytes([number]) for number in range(4))


def test_a_run_is_told_in_the_parts_that_are_new() -> None:
    """Each part with its tokens and the block before it."""
    told_once = FirstAndLast()
    assert told_once.told([stored(1)]) == [stored(1)]
    (first, last) = told_once.told([stored(0, 1, 2, 3, parent=9)])
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ((A,), bytes([9]), (0, 1))
    assert (last.block_hashes, last.parent_block_hash, last.token_ids) == ((C, D), B, (4, 5, 6, 7))
    assert told_once.told([stored(2, 3)]) == []


def test_a_removal_is_told_with_the_last_block() -> None:
    told_once = FirstAndLast()
    told_once.told([stored(0, 1), stored(1, 2), stored(1)])
    assert told_once.told([BlockRemoved((B,))]) == []
    assert told_once.told([BlockRemoved((A, B))]) == [BlockRemoved((A,))]
    assert told_once.told([BlockRemoved((B,))]) == [BlockRemoved((B,))]
    assert told_once.told([stored(1)]) == [stored(1)]


def test_groups_and_media_are_apart() -> None:
    told_once = FirstAndLast()
    on_disk = BlockStored((A,), None, (0, 1), 2, medium="STORAGE")
    other = BlockStored((A,), None, (0, 1), 2, group_idx=1)
    assert told_once.told([stored(0), on_disk, other]) == [stored(0), on_disk, other]
    assert told_once.told([BlockRemoved((A,), group_idx=1)]) == [BlockRemoved((A,), group_idx=1)]


def test_after_a_clearing_all_is_new() -> None:
    told_once = FirstAndLast()
    told_once.told([stored(0), stored(0)])
    assert told_once.told([AllBlocksCleared(), stored(0)]) == [AllBlocksCleared(), stored(0)]
    assert told_once.told([BlockRemoved((A,))]) == [BlockRemoved((A,))]


def test_what_is_unknown_is_removed_all_the_same() -> None:
    """A publisher may start behind a cache that has blocks."""
    assert FirstAndLast().told([BlockRemoved((A,))]) == [BlockRemoved((A,))]

"""A snapshot of published events rebuilds what they left cached, in parts of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from kvjax.core import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.events import cached_blocks as module
from kvjax.events.cached_blocks import CachedBlocks
from tests.events.workload import SETUPS, Workload, cached_blocks, make_manager


def counts(events: Iterable[KVCacheEvent]) -> Counter[tuple[int, bytes]]:
    """Blocks of each group and hash that events leave."""
    left: Counter[tuple[int, bytes]] = Counter()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            left.clear()
        else:
            change = left.update if isinstance(event, BlockStored) else left.subtract
            change((event.group_idx, block_hash) for block_hash in event.block_hashes)
    return +left


def told_blocks(events: Iterable[KVCacheEvent]) -> dict[tuple[int, bytes], tuple]:
    """What is told of each block beside its place in a run."""
    told = {}
    for event in events:
        if isinstance(event, BlockStored):
            size = event.block_size
            for i, block_hash in enumerate(event.block_hashes):
                parent = event.block_hashes[i - 1] if i else event.parent_block_hash
                extra = event.extra_keys and event.extra_keys[i]
                rest = (size, extra, event.medium, event.kind, event.sliding_window)
                told[event.group_idx, block_hash] = (parent, event.token_ids[i * size : (i + 1) * size], *rest)
    return told


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_rebuilds_what_is_cached(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it is cached, with all that was told of it, parents that are cached first, no part too large."""
    monkeypatch.setattr(module, "PART_TOKENS", 8)
    work, cached, told = Workload(make_manager(SETUPS[name], 30), seed, ("a", None)), CachedBlocks(), {}
    for _ in range(100):
        work.step()
        events = work.manager.take_events()
        cached.apply(events)
        told |= told_blocks(events)
        parts = list(cached.snapshot())
        snapshot = [event for part in parts for event in part]
        assert snapshot[0] == AllBlocksCleared()
        assert snapshot.count(AllBlocksCleared()) == 1
        assert counts(snapshot) == {
            (group_id, block_hash): count
            for group_id, hashes in cached_blocks(work.manager).items()
            for block_hash, count in hashes.items()
        }
        rebuilt = told_blocks(snapshot)
        assert rebuilt == {key: told[key] for key in rebuilt}
        for part in parts:
            assert sum(len(event.token_ids) for event in part if isinstance(event, BlockStored)) <= 8
        seen: set[tuple[int, bytes]] = set()
        for event in snapshot[1:]:
            parent = (event.group_idx, event.parent_block_hash)
            assert parent in seen or parent not in rebuilt
            seen |= {(event.group_idx, block_hash) for block_hash in event.block_hashes}
    assert work.num_resets
    assert work.num_preemptions


def stored(*numbers: int, parent: int | None = None, size: int = 2) -> BlockStored:
    hashes = tuple(bytes([number]) for number in numbers)
    tokens = tuple(range(size * len(hashes)))
    return BlockStored(hashes, None if parent is None else bytes([parent]), tokens, size)


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(tuple(bytes([number]) for number in numbers))


def snapshot_of(*events: KVCacheEvent) -> list[KVCacheEvent]:
    cached = CachedBlocks()
    cached.apply(events)
    return [event for part in cached.snapshot() for event in part]


def test_runs_stay_one_event_and_break_where_blocks_are_gone() -> None:
    cleared = AllBlocksCleared()
    assert snapshot_of() == [cleared]
    assert snapshot_of(stored(1, 2, 3)) == [cleared, stored(1, 2, 3)]
    assert snapshot_of(stored(1, 2, 3), cleared, stored(4)) == [cleared, stored(4)]
    _, first, last = snapshot_of(stored(1, 2, 3), removed(2))
    assert (first, last) == (stored(1), BlockStored((b"\3",), b"\2", (4, 5), 2))


def test_a_parent_that_was_stored_again_comes_first() -> None:
    events = snapshot_of(stored(1, 2, 3), removed(1), stored(1))
    assert [event.block_hashes for event in events[1:]] == [(b"\1",), (b"\2", b"\3")]


def test_what_was_never_told_is_passed_over() -> None:
    assert snapshot_of(removed(1), stored(1), removed(1, 1, 2)) == [AllBlocksCleared()]


def test_parents_in_a_circle_end() -> None:
    """No manager tells such: nothing hangs."""
    assert len(snapshot_of(stored(1, parent=2), stored(2, parent=1))) == 3


def test_a_block_larger_than_a_part_is_one() -> None:
    cached = CachedBlocks()
    cached.apply([stored(1, 2, 3, size=module.PART_TOKENS + 1)])
    assert [len(part) for part in cached.snapshot()] == [2, 1, 1]  # the first with the clearing

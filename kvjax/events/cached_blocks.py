"""What published events say is cached: the events that rebuild it, for subscribers that come late.

Flow:    events of a batch -> [CachedBlocks] -> snapshot: AllBlocksCleared, BlockStored ... in parts of bounded size

A snapshot tells each block as often as it was stored and not removed. A block's parent, if it is cached, comes before
it, and blocks of one sequence that were stored together stay one event.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.watch.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.core.watch.repeats import take_repeat

PART_TOKENS = 1 << 16  # of a part, or of one block if it has more
TOKEN_CODE = "i"  # of an array: int32, as a request's tokens are


class StoredRun(NamedTuple):
    """Blocks that one event stored, their tokens packed."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    tokens: array[int]
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None
    like: BlockStored  # what is told of the blocks beside

    def parent_of(self, place: int) -> BlockHash | None:
        """Hash of the block before the one at `place`."""
        return self.block_hashes[place - 1] if place else self.parent_block_hash

    def part(self, first: int, end: int) -> BlockStored:
        """The blocks [first, end) as an event."""
        return stored_part(
            self.like, self.block_hashes, self.parent_block_hash, self.tokens, self.extra_keys, first, end
        )


def stored_part(
    like: BlockStored,  # what is told of the blocks beside
    block_hashes: tuple[BlockHash, ...],
    parent_block_hash: BlockHash | None,  # of the block before the run
    tokens: Sequence[int],
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None,
    first: int,
    end: int,
) -> BlockStored:
    """The blocks [first, end) of a run as an event."""
    size = like.block_size
    return replace(
        like,
        block_hashes=block_hashes[first:end],
        parent_block_hash=block_hashes[first - 1] if first else parent_block_hash,
        token_ids=tuple(tokens[first * size : end * size]),
        extra_keys=None if extra_keys is None else extra_keys[first:end],
    )


Place = tuple[StoredRun, int]  # a block: its run, and its number there


class CachedBlocks:
    """Owned by the publisher's thread. About 1 us and 300 bytes a block of 16 tokens; a snapshot 3 us a block."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], dict[BlockHash, Place]] = {}  # by medium and group
        self._repeats: Counter[tuple[str, int, BlockHash]] = Counter()  # blocks of a hash beyond the first
        self._likes: dict[tuple[str, int, int | None, str | None], BlockStored] = {}  # of a group and an adapter

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Takes the events of a batch, oldest first. A removal of what was never told is passed over."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._groups.clear()
                self._repeats.clear()

    def _store(self, event: BlockStored) -> None:
        blocks = self._groups.setdefault((event.medium, event.group_idx), {})
        tokens = array(TOKEN_CODE, event.token_ids)
        run = StoredRun(event.block_hashes, event.parent_block_hash, tokens, event.extra_keys, self._like(event))
        for place, block_hash in enumerate(event.block_hashes):
            if block_hash in blocks:
                self._repeats[event.medium, event.group_idx, block_hash] += 1
            else:
                blocks[block_hash] = (run, place)

    def _like(self, event: BlockStored) -> BlockStored:
        """The event without what differs from run to run."""
        key = (event.medium, event.group_idx, event.lora_id, event.lora_name)
        if key not in self._likes:
            bare = replace(event, block_hashes=(), parent_block_hash=None, token_ids=(), extra_keys=None)
            self._likes[key] = bare
        return self._likes[key]

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self._groups.get((event.medium, event.group_idx), {})
        for block_hash in event.block_hashes:
            if not take_repeat(self._repeats, (event.medium, event.group_idx, block_hash)):
                blocks.pop(block_hash, None)

    def snapshot(self) -> Iterator[list[KVCacheEvent]]:
        """The events of one part after the other; the first begins with `AllBlocksCleared`."""
        part: list[KVCacheEvent] = [AllBlocksCleared()]
        num_tokens = 0
        for run, first, end in self._runs():
            if num_tokens and num_tokens + (end - first) * run.like.block_size > PART_TOKENS:
                yield part
                part, num_tokens = [], 0
            part.append(run.part(first, end))
            num_tokens += (end - first) * run.like.block_size
        yield part

    def _runs(self) -> Iterator[tuple[StoredRun, int, int]]:
        """Blocks [first, end) of a run, none with more than `PART_TOKENS` tokens but single blocks."""
        run, first, end = None, 0, 0
        for one, place in self._blocks():
            if one is run and place == end and (end + 1 - first) * one.like.block_size <= PART_TOKENS:
                end += 1
                continue
            if run is not None:
                yield run, first, end
            run, first, end = one, place, place + 1
        if run is not None:
            yield run, first, end

    def _blocks(self) -> Iterator[Place]:
        """All blocks, group by group, parents first, then those of repeated hashes."""
        for blocks in self._groups.values():
            yield from _parents_first(blocks)
        for (medium, group_id, block_hash), count in self._repeats.items():
            yield from [self._groups[medium, group_id][block_hash]] * count


def _parents_first(blocks: dict[BlockHash, Place]) -> Iterator[Place]:
    told: set[BlockHash] = set()
    for block_hash in blocks:
        chain: list[Place] = []
        before: BlockHash | None = block_hash
        while before is not None and before in blocks and before not in told:
            told.add(before)
            run, place = blocks[before]
            chain.append((run, place))
            before = run.parent_of(place)
        yield from reversed(chain)


__all__ = ["CachedBlocks"]

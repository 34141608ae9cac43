"""Events that tell a hash with the first block that holds it, and its removal with the last one.

Flow:    events of a batch -> [FirstAndLast.told] -> EventEncoder

A pool may hold one hash in several blocks, after two requests computed the same tokens at once. vLLM tells each block,
and a reader has to count. Dynamo's indexer (`dynamo.indexer` 1.6) counts not: the first removal ends the hash, though
lookups still hit. Of events that tell a hash once both kinds of readers make the same set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.watch.kv_events import BlockRemoved, BlockStored, KVCacheEvent


class FirstAndLast:
    """Owned by the publisher's thread. About 0.3 us and 100 bytes a block."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, int], dict[BlockHash, int]] = {}  # by medium and group: blocks of each hash

    def told(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """What of a batch, oldest first, a reader needs that does not count. A removal of what is unknown is told."""
        told: list[KVCacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                told += self._stored(event)
            elif isinstance(event, BlockRemoved):
                told += self._removed(event)
            else:
                self._holders.clear()
                told.append(event)
        return told

    def _stored(self, event: BlockStored) -> Iterator[BlockStored]:
        """The runs of blocks whose hashes no other block holds."""
        holders = self._holders.setdefault((event.medium, event.group_idx), {})
        is_first = []
        for block_hash in event.block_hashes:
            count = holders.get(block_hash, 0)
            holders[block_hash] = count + 1
            is_first.append(not count)
        if all(is_first):
            yield event
            return
        for first, run in groupby(range(len(is_first)), is_first.__getitem__):
            if first:
                places = [*run]
                yield _part(event, places[0], places[-1] + 1)

    def _removed(self, event: BlockRemoved) -> Iterator[BlockRemoved]:
        holders = self._holders.get((event.medium, event.group_idx), {})
        gone = []
        for block_hash in event.block_hashes:
            count = holders.pop(block_hash, 1)
            if count > 1:
                holders[block_hash] = count - 1
            else:
                gone.append(block_hash)
        if gone:
            yield replace(event, block_hashes=tuple(gone))


def _part(event: BlockStored, first: int, end: int) -> BlockStored:
    """The blocks [first, end) of a run."""
    size, keys = event.block_size, event.extra_keys
    return replace(
        event,
        block_hashes=event.block_hashes[first:end],
        parent_block_hash=event.block_hashes[first - 1] if first else event.parent_block_hash,
        token_ids=event.token_ids[first * size : end * size],
        extra_keys=None if keys is None else keys[first:end],
    )


__all__ = ["FirstAndLast"]

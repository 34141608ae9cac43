"""Events that tell a hash with the first block that holds it, and its removal with the last one.

Flow:    events of a batch -> [FirstAndLast.told] -> EventEncoder

A pool may hold one hash in several blocks, after two requests computed the same tokens at once. vLLM tells each block,
and a reader has to count. Dynamo's indexer (`dynamo.indexer` 1.6) counts not: the first removal ends the hash, though
lookups still hit. Of events that tell a hash once both kinds of readers make the same set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.watch.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kvjax.core.watch.repeats import take_repeat
from kvjax.events.cached_blocks import stored_part


class FirstAndLast:
    """Owned by the publisher's thread."""

    def __init__(self) -> None:
        self._held: set[tuple[str, int, BlockHash]] = set()  # by medium and group
        self._repeats: Counter[tuple[str, int, BlockHash]] = Counter()  # blocks of a hash beyond the first

    def told(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """What of a batch, oldest first, a reader needs that does not count. A removal of what is unknown is told."""
        told: list[KVCacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                told += self._stored(event)
            elif isinstance(event, BlockRemoved):
                told += self._removed(event)
            else:
                self._held.clear()
                self._repeats.clear()
                told.append(event)
        return told

    def _stored(self, event: BlockStored) -> Iterator[BlockStored]:
        """The runs of blocks whose hashes no other block holds."""
        is_first = [self._is_first((event.medium, event.group_idx, each)) for each in event.block_hashes]
        if all(is_first):
            yield event
            return
        for first, run in groupby(range(len(is_first)), is_first.__getitem__):
            if first:
                places = [*run]
                yield stored_part(
                    event,
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.extra_keys,
                    places[0],
                    places[-1] + 1,
                )

    def _is_first(self, key: tuple[str, int, BlockHash]) -> bool:
        """Notes a block of a hash; False: another has it."""
        if key in self._held:
            self._repeats[key] += 1
            return False
        self._held.add(key)
        return True

    def _removed(self, event: BlockRemoved) -> Iterator[BlockRemoved]:
        """The hashes that no block holds any more."""
        keys = [(event.medium, event.group_idx, each) for each in event.block_hashes]
        gone = [key for key in keys if not take_repeat(self._repeats, key)]
        self._held.difference_update(gone)
        if gone:
            yield replace(event, block_hashes=tuple(block_hash for *_, block_hash in gone))


__all__ = ["FirstAndLast"]

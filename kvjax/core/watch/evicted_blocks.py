"""What a pool has lately forgotten: which hashes, how many evictions ago and when. A ghost list.

Flow:    PrefixIndex.forget, clear -> [EvictedBlocks] -> LookupStates

Every hashed block that ceases to be a hit gets the next number; the last `max_blocks` of them are remembered, in a ring
of keys and a dict from key to number. A hash that was forgotten twice counts from the last time. A hash that is cached
again, or held by another block, is still listed: ask the index first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvjax.core.hashing.block_hash import BlockHash


@dataclass(frozen=True)
class EvictedBlock:
    """How a cached block ceased to be a hit."""

    was_reused: bool  # for other contents; False: dropped by invalidate, evict_blocks or reset_prefix_cache
    num_evicted_since: int  # blocks of its pool that ceased to be hits after it
    seconds_since: float


class EvictedBlocks:
    """The ghosts of one pool: about 250 bytes each, 16 before there is one. Adding costs about 0.5 us a block."""

    def __init__(self, max_blocks: int, clock: Callable[[], int]) -> None:
        self._clock = clock  # nanoseconds
        self._num_evicted = 0
        self._number_of: dict[tuple[int, BlockHash], int] = {}  # (group, hash) -> when it was last forgotten
        self._keys: list[tuple[int, BlockHash] | None] = [None] * max_blocks  # by number modulo max_blocks
        self._events: list[tuple[int, bool]] = [(0, False)] * max_blocks  # likewise: time, whether reused

    def __len__(self) -> int:
        return len(self._number_of)

    def add(self, hashes: Iterable[BlockHash], group_ids: Iterable[int], was_reused: bool) -> None:
        """Blocks were forgotten, in this order."""
        event, number, size = (self._clock(), was_reused), self._num_evicted, len(self._keys)
        for key in zip(group_ids, hashes, strict=True):
            place = number % size
            oldest = self._keys[place]
            if oldest is not None and self._number_of[oldest] == number - size:
                del self._number_of[oldest]
            self._number_of[key] = number
            self._keys[place], self._events[place] = key, event
            number += 1
        self._num_evicted = number

    def number_of(self, block_hash: BlockHash, group_id: int) -> int | None:
        """The number under which a hash of a group was forgotten; None: never, or too long ago."""
        return self._number_of.get((group_id, block_hash))

    def was_reused(self, number: int) -> bool:
        """Whether the block of a number that is remembered got other contents."""
        return self._events[number % len(self._keys)][1]

    def describe(self, number: int) -> EvictedBlock:
        """What is known of a number that is remembered."""
        time_ns, was_reused = self._events[number % len(self._keys)]
        return EvictedBlock(was_reused, self._num_evicted - 1 - number, (self._clock() - time_ns) / 1e9)

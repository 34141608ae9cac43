"""Recurrent states that sglang-jax's prefix cache keeps, one slot a prefix: a hit ends where there is one.

Flow:    PrefixCache -> [StateCheckpoints] -> slots of HybridReqToTokenPool.recurrent_free_slots, and back
Source:  RecurrentComponent of sgl-project/sglang-jax, srt/mem_cache/unified_cache_components/recurrent_component.py

A request that ends gives the slot of its state, or with an extra buffer (`recurrent_ping_pong_track_buffer`) the one
that has the state of the last page boundary; a request that goes on gives that one too and gets another for it. The
stack keeps states at leaves only, here any prefix may have one. With probation those at which no prompt and no answer
ended go first, until a hit used them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, final

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import BlockStateError


@final
class StateCheckpoints:
    """Slots of one data-parallel rank by the hash of a prefix's last page, least recently used first."""

    def __init__(self, slots: Any, rank: int, *, has_probation: bool = False) -> None:
        self._slots, self._rank = slots, rank  # the stack's HybridReqToTokenPool
        self._has_probation = has_probation
        self._on_probation: set[BlockHash] = set()
        self._by_hash: OrderedDict[BlockHash, int] = OrderedDict()
        self._locks: Counter[BlockHash] = Counter()

    @property
    def num_evictable(self) -> int:
        """Slots without a lock."""
        return len(self._by_hash) - len(self._locks)

    @property
    def num_protected(self) -> int:
        """Slots under a lock."""
        return len(self._locks)

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """Pages of the longest prefix with a state, which becomes the most recently used one."""
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._by_hash:
                self._by_hash.move_to_end(hashes[count - 1])
                self._on_probation.discard(hashes[count - 1])
                return count
        return 0

    def slot_of(self, block_hash: BlockHash) -> int:
        """The slot of a prefix that has one."""
        return self._by_hash[block_hash]

    def check(self, block_hash: BlockHash) -> None:
        """Raises BlockStateError unless the prefix has a state."""
        if block_hash not in self._by_hash:
            raise BlockStateError("a recurrent state was evicted since its prefix was matched; match the prefix again")

    def lock(self, block_hash: BlockHash) -> None:
        """Keeps a state until as many `unlock`s."""
        self._locks[block_hash] += 1

    def unlock(self, block_hash: BlockHash) -> None:
        """Ends a `lock`."""
        self._locks[block_hash] -= 1
        if not self._locks[block_hash]:
            del self._locks[block_hash]

    def put(self, block_hash: BlockHash, slot: int) -> bool:
        """Takes a slot over; False, and nothing is taken, if the prefix has one."""
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = slot
        if self._has_probation:
            self._on_probation.add(block_hash)
        return True

    def keep(self, block_hash: BlockHash) -> None:
        """A prompt or an answer ends behind a prefix: its state, if there is one, is on probation no more."""
        self._on_probation.discard(block_hash)

    def evict(self, count: int) -> int:
        """Frees at most `count` slots without a lock, on probation first, least recently used first; how many."""
        evictable = [h for h in self._by_hash if h not in self._locks]
        evictable.sort(key=lambda h: h not in self._on_probation)
        return self._free(evictable[: max(count, 0)])

    def keep_cached(self, pool: BlockPool) -> int:
        """Frees the slots of prefixes whose pages are no longer cached; how many."""
        hashes = list(self._by_hash)
        return self._free([h for h, page in zip(hashes, pool.find_each(hashes, 0).tolist(), strict=True) if page < 0])

    def clear(self) -> None:
        """Forgets all; whoever clears the pool of slots frees them."""
        self._by_hash.clear()
        self._on_probation.clear()
        self._locks.clear()

    def replacement(self) -> int | None:
        """A free slot, after an eviction if need be; None: all are owned or locked."""
        slot = self._slots.alloc_recurrent_slot(self._rank)
        if slot is None and self.evict(1):
            slot = self._slots.alloc_recurrent_slot(self._rank)
        return slot

    def _free(self, hashes: Sequence[BlockHash]) -> int:
        self._on_probation.difference_update(hashes)
        for block_hash in hashes:
            self._slots.free_recurrent_slot(self._by_hash.pop(block_hash), self._rank)
        return len(hashes)

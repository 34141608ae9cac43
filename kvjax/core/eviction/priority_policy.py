"""What policies by priority share: a queue of unhashed blocks, taken first, and a `PriorityOrder` of hashed ones.

Flow:    CostAwarePolicy, BeladyPolicy -> [PriorityPolicy] -> FreeKVCacheBlockQueue, PriorityOrder

Invariant (`check_invariants`):

    C1  blank blocks are unhashed, all others hashed; O1 of the order
"""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.priority_order import PriorityOrder
from kvjax.errors import InvariantError


class PriorityPolicy(EvictionPolicy):
    """Subclasses say what priority a hashed block has, when it is released or (`_pop`) as blocks are taken."""

    is_told_of_use: ClassVar[bool] = True

    def __init__(self, index: HashedBlocks) -> None:
        super().__init__(index)
        self._blank = FreeKVCacheBlockQueue(self.num_blocks)
        self._blank.remove(0)
        self._cached = PriorityOrder(self.num_blocks)

    @property
    def num_free(self) -> int:
        """Blank and cached blocks."""
        return self._blank.num_free_blocks + self._cached.num_queued

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Blank ones, then those of lowest priority."""
        self.check_available(num_blocks)
        num_blank = min(num_blocks, self._blank.num_free_blocks)
        ids = self._blank.take(num_blank)
        return ids if num_blank == num_blocks else np.concatenate((ids, self._pop(num_blocks - num_blank)))

    def release(self, ids: np.ndarray) -> None:
        """Unhashed ones to the tail of the blank queue, others by priority."""
        hashed = self.index.is_hashed[ids]
        if np.count_nonzero(hashed) < ids.size:
            self._blank.append_distinct(ids[~hashed])
            ids = ids[hashed]
        if ids.size:
            self._push(ids)

    @abc.abstractmethod
    def _push(self, ids: np.ndarray) -> None:
        """Puts hashed blocks, at least one, into the order."""

    def _pop(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Removes the first `num_blocks` blocks of the order; there are as many."""
        return self._cached.pop(num_blocks)

    def remove(self, ids: np.ndarray) -> None:
        """From the queue or the order."""
        cached = self._cached.contains_n(ids)
        self._cached.remove(ids[cached])
        self._blank.remove_n(ids[~cached])

    def order(self) -> np.ndarray:  # int32[num_free]
        """Blank ones in order of release, then by priority."""
        return np.concatenate((self._blank.get_all_free_blocks(), self._cached.order().astype(np.int32)))

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Free ones join the blank queue."""
        free = ids[self._cached.contains_n(ids)]
        self._cached.remove(free)
        self._blank.append_distinct(free)

    def check_invariants(self) -> None:
        """Checks C1, the queue and the order."""
        self._blank.check_invariants()
        self._cached.check_invariants()
        is_hashed = self.index.is_hashed
        if is_hashed[self._blank.get_all_free_blocks()].any() or not is_hashed[self._cached.order()].all():
            raise InvariantError("C1: a blank block is hashed, or one with a priority is not")

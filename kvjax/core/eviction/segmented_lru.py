"""Segmented LRU: a block that was hit outlives all that never were, so one-off prompts do not flush shared prefixes.

Source:  Karedla, Love, Wherry: Caching strategies to improve disk system performance, IEEE Computer 27(3), 1994

Three queues, taken in this order:

    blank       no hash: nothing is lost
    probation   hashed, not hit since it came here
    protected   hashed and hit; at most `protected_share` of the pool

    release -> blank | probation | protected -(overflow: its oldest)-> tail of probation

A hit leaves its queue and joins the protected one when it is released again. Within a queue the order is LRU. The share
is small by default: most conversations hit their prefixes and then end, so few blocks are worth protecting longer
(docs/eviction.md).

Invariants (`check_invariants`):

    S1  blank blocks are unhashed; probation and protected ones are hashed
    S2  no block of probation counts as hit, every protected one does; protected holds at most its share
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.queues import make_queues, take_in_turn
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.errors import InvariantError


class SegmentedLRUPolicy(EvictionPolicy):
    """Three `FreeKVCacheBlockQueue`s: about three times the cost of LRU."""

    is_told_of_use: ClassVar[bool] = True

    def __init__(self, index: HashedBlocks, protected_share: float = 0.2) -> None:
        if not 0 <= protected_share <= 1:
            raise ValueError(f"expected protected_share in [0, 1], got {protected_share}")
        super().__init__(index)
        self.max_protected = int(protected_share * (self.num_blocks - 1))
        self._queues = make_queues(3, self.num_blocks)
        self._blank, self._probation, self._protected = self._queues
        self._was_hit = np.zeros(self.num_blocks, np.bool_)

    @property
    def num_free(self) -> int:
        """Blocks of the three queues."""
        return sum(queue.num_free_blocks for queue in self._queues)

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """From the heads of the queues, one after another."""
        self.check_available(num_blocks)
        ids = take_in_turn(self._queues, num_blocks)
        self._was_hit[ids] = False
        return ids

    def release(self, ids: np.ndarray) -> None:
        """To the tail of each block's queue; a block that overflows from protected joins probation at that moment."""
        hashed = self.index.is_hashed[ids]
        if np.count_nonzero(hashed) < ids.size:
            self._blank.append_distinct(ids[~hashed])
            ids = ids[hashed]
        hit = self._was_hit[ids]
        if np.count_nonzero(hit):
            ids = self._protect(ids, hit)
        self._probation.append_distinct(ids)

    def _protect(self, ids: np.ndarray, hit: np.ndarray) -> np.ndarray:
        """Takes the `hit` ones of `ids` in, and returns the others, with what they pushed out in their places."""
        protected = self._protected
        protected.append_distinct(ids[hit])
        num_over = max(protected.num_free_blocks - self.max_protected, 0)
        demoted = protected.take(num_over)
        self._was_hit[demoted] = False
        pushing = np.flatnonzero(hit)[np.count_nonzero(hit) - num_over :]  # from there on each pushes one out
        leaving, stays = ids.copy(), ~hit
        leaving[pushing], stays[pushing] = demoted, True
        return leaving[stays]

    def remove(self, ids: np.ndarray) -> None:
        """From the middle of their queues."""
        for queue in self._queues:
            queue.remove_distinct(ids[queue.contains_n(ids)])

    def order(self) -> np.ndarray:  # int32[num_free]
        """The queues one after another."""
        return np.concatenate([queue.get_all_free_blocks() for queue in self._queues])

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows up to the first that may be given a block of a queue into which the step frees blocks.

        Protected blocks may overflow into probation. So a step that frees anything must not be given protected blocks,
        and a step that frees unhashed blocks must be given blank ones alone.
        """
        length = flow.rows_within(self.num_free)
        ids, positions = flow.released()
        if ids.size:
            num_blank, num_probation = self._blank.num_free_blocks, self._probation.num_free_blocks
            blank_from = flow.rows_before(positions[~self.index.is_hashed[ids]])
            length = min(length, max(flow.rows_within(num_blank), blank_from))
            length = min(length, max(flow.rows_within(num_blank + num_probation), flow.rows_before(positions)))
        return length

    def note_hit(self, ids: np.ndarray) -> None:
        """They join the protected queue when they are free again."""
        self._was_hit[ids] = self.index.is_hashed[ids]

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Free ones join the blank queue."""
        self._was_hit[ids] = False
        free = ids[self._probation.contains_n(ids) | self._protected.contains_n(ids)]
        self.remove(free)
        self._blank.append_distinct(free)

    def state(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths of the queues, and the blocks that count as hit."""
        lengths = tuple(queue.num_free_blocks for queue in self._queues)
        return lengths, tuple(np.flatnonzero(self._was_hit).tolist())

    def check_invariants(self) -> None:
        """Checks S1 and S2, and the queues."""
        for queue in self._queues:
            queue.check_invariants()
        blank, probation, protected = (queue.get_all_free_blocks() for queue in self._queues)
        is_hashed = self.index.is_hashed
        if is_hashed[blank].any() or not (is_hashed[probation].all() and is_hashed[protected].all()):
            raise InvariantError("S1: a blank block is hashed, or one of probation or protected is not")
        if self._was_hit[probation].any() or not self._was_hit[protected].all():
            raise InvariantError("S2: a block of probation counts as hit, or a protected one does not")
        if protected.size > self.max_protected:
            raise InvariantError(f"S2: {protected.size} protected blocks, at most {self.max_protected} expected")

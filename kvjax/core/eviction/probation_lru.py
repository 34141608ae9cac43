"""LRU with probation: nothing of use goes while there is anything that nobody asked for.

Queues, taken in this order; within each the block that was released longest ago goes first:

    blank       no hash: nothing is lost
    probation   kept in case somebody parts there (`note_probation`), and not hit yet
    lasting     all other hashed blocks
    young       released since the last step was planned, in the same three parts

    release -> young -(a step is planned, a request freed, or the others are empty)-> blank | probation | lasting

A step that releases and takes blocks for many rows takes none of what it releases itself. So it takes the same blocks
whether its rows are planned one by one or at once, as long as older ones last.

Invariants (`check_invariants`):

    L1  blank blocks are unhashed, those of probation and lasting are hashed, on probation or not as their queue says
    L2  only hashed blocks are on probation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.queues import make_queues, remove_from, take_in_turn
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.errors import InvariantError


class ProbationLRUPolicy(EvictionPolicy):
    """Four `FreeKVCacheBlockQueue`s. A block passes two of them from its release until it is taken."""

    is_told_of_use: ClassVar[bool] = True
    knows_probation: ClassVar[bool] = True
    is_told_of_registrations: ClassVar[bool] = False

    def __init__(self, index: HashedBlocks) -> None:
        super().__init__(index)
        self._queues = make_queues(4, self.num_blocks)
        self._blank, self._probation, self._lasting, self._young = self._queues
        self._old = self._queues[:3]
        self._on_probation = np.zeros(self.num_blocks, np.bool_)

    @property
    def num_free(self) -> int:
        """Blocks of the four queues."""
        return self._num_old + self._young.num_free_blocks

    @property
    def _num_old(self) -> int:
        return sum([queue.num_free_blocks for queue in self._old])

    @property
    def joins_releases(self) -> bool:
        """All join the tail of one queue."""
        return True

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """From the heads of the queues, one after another."""
        if num_blocks <= self._blank.num_free_blocks:
            return self._blank.take(num_blocks)
        self.check_available(num_blocks)
        parts = take_in_turn(self._old, num_blocks)
        missing = num_blocks - sum(part.size for part in parts)
        if missing:
            self.note_step_planned()
            parts += take_in_turn(self._old, missing)
        ids = np.concatenate(parts)
        self._on_probation[ids] = False
        return ids

    def take_one(self) -> int:
        """`take` of one block."""
        return self._blank.popleft() if self._blank.num_free_blocks else int(self.take(1)[0])

    def release(self, ids: np.ndarray) -> None:
        """To the tail of the young ones."""
        self._young.append_distinct(ids)

    def release_few(self, ids: Sequence[int]) -> None:
        """`release` of a few blocks."""
        self._young.append_few(ids)

    def try_release(self, ids: np.ndarray) -> bool:
        """The queue sees a repeated block while it writes."""
        return self._young.append_absent(ids)

    def note_step_planned(self) -> None:
        """The young ones join the other queues in the order of their release."""
        if self._young.num_free_blocks:
            parts = self._parts(self._young.take(self._young.num_free_blocks))
            for queue, ids in zip(self._old, parts, strict=True):
                queue.append_distinct(ids)

    def _parts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those of int64[n] blocks that are blank, on probation, lasting."""
        hashed, on_probation = self.index.is_hashed[ids], self._on_probation[ids]
        return ids[~hashed], ids[on_probation], ids[hashed & ~on_probation]

    def remove(self, ids: np.ndarray) -> None:
        """From the middle of their queues."""
        remove_from(self._queues, ids)

    def order(self) -> np.ndarray:  # int32[num_free]
        """The queues one after another, of the young ones part by part."""
        old = [queue.get_all_free_blocks() for queue in self._old]
        young = self._young.get_all_free_blocks().astype(np.int64)
        return np.concatenate([*old, *self._parts(young)]).astype(np.int32)

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows that older blocks suffice for: what a step releases is young."""
        return flow.rows_within(self._num_old)

    def note_probation(self, ids: np.ndarray) -> None:
        """Where they go when they are released."""
        self._on_probation[ids] = True

    def note_hit(self, ids: np.ndarray) -> None:
        """They are on probation no more."""
        self._on_probation[ids] = False

    def note_lasting(self, ids: np.ndarray) -> None:
        """Free ones leave the queue of probation for the tail of the lasting."""
        self._on_probation[ids] = False
        free = ids[self._probation.contains_n(ids)]
        self._probation.remove_n(free)
        self._lasting.append_distinct(free)

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Free ones join the blank queue; young ones will."""
        self._on_probation[ids] = False
        free = ids[self._probation.contains_n(ids) | self._lasting.contains_n(ids)]
        self.remove(free)
        self._blank.append_distinct(free)

    def state(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Lengths of the queues, the blocks on probation, and the young ones in order."""
        lengths = tuple(queue.num_free_blocks for queue in self._queues)
        on_probation = tuple(np.flatnonzero(self._on_probation).tolist())
        return lengths, on_probation, tuple(self._young.get_all_free_blocks().tolist())

    def check_invariants(self) -> None:
        """Checks L1 and L2, and the queues."""
        for queue in self._queues:
            queue.check_invariants()
        blank, probation, lasting = (queue.get_all_free_blocks() for queue in self._old)
        is_hashed, on_probation = self.index.is_hashed, self._on_probation
        if is_hashed[blank].any() or not (is_hashed[probation].all() and is_hashed[lasting].all()):
            raise InvariantError("L1: a blank block is hashed, or one of probation or lasting is not")
        if on_probation[lasting].any() or not on_probation[probation].all():
            raise InvariantError("L1: a lasting block is on probation, or one of probation is not")
        if (on_probation & ~is_hashed).any():
            raise InvariantError("L2: an unhashed block is on probation")

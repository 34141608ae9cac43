"""Probation: nothing of use goes while there is anything that nobody asked for.

Queues, taken in this order; but for the lasting ones the block that was released longest ago goes first:

    blank       no hash: nothing is lost
    probation   kept in case somebody parts there (`note_probation`), and not hit yet
    lasting     all other hashed blocks, in an order of their own (`LastingBlocks`): LRU, or as was learned
    young       released since the last step was planned, in the same three parts

    release -> young -(a step is planned, a request freed, or the others are empty)-> blank | probation | lasting

A step that releases and takes blocks for many rows takes none of what it releases itself. So it takes the same blocks
whether its rows are planned one by one or at once, as long as older ones last.

Invariants (`check_invariants`):

    L1  blank blocks are unhashed, those of probation and lasting are hashed, on probation or not as their queue says
    L2  only hashed blocks are on probation
    L3  as many blocks are counted as free as the queues have
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.lasting_blocks import LastingBlocks, LRUOrder
from kvjax.core.eviction.learned_order import LearnedOrder
from kvjax.core.eviction.learned_table import LearnedClass
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.queues import make_queues, remove_from, take_in_turn
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.core.eviction.young_blocks import YoungBlocks
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import InvariantError


class ProbationPolicy(EvictionPolicy):
    """Two `FreeKVCacheBlockQueue`s and `LastingBlocks`, and before them `YoungBlocks`."""

    is_told_of_use: ClassVar[bool] = True
    knows_probation: ClassVar[bool] = True
    is_told_of_registrations: ClassVar[bool] = False

    def __init__(self, index: HashedBlocks, lasting: LastingBlocks) -> None:
        super().__init__(index)
        self._blank, self._probation = make_queues(2, self.num_blocks)
        self._young = YoungBlocks(self.num_blocks)
        self._set_lasting(lasting)
        self._num_free = self.num_blocks - 1
        self._on_probation = np.zeros(self.num_blocks, np.bool_)
        self._knew_probation = False  # whether any block was ever on probation

    def _set_lasting(self, lasting: LastingBlocks) -> None:
        """Chooses the order of lasting blocks while there are none."""
        self._lasting = lasting
        self._old: tuple[FreeKVCacheBlockQueue | LastingBlocks, ...] = (self._blank, self._probation, lasting)
        self._queues: tuple[FreeKVCacheBlockQueue | LastingBlocks | YoungBlocks, ...] = (*self._old, self._young)

    @property
    def num_free(self) -> int:
        """Blocks of all queues."""
        return self._num_free

    @property
    def _num_old(self) -> int:
        return self._num_free - self._young.num_free_blocks

    @property
    def joins_releases(self) -> bool:
        """All join the tail of one queue."""
        return True

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """From the heads of the queues, one after another."""
        if 0 <= num_blocks <= self._blank.num_free_blocks:
            self._num_free -= num_blocks
            return self._blank.take(num_blocks)
        self.check_available(num_blocks)
        self._num_free -= num_blocks
        ids = take_in_turn(self._old, num_blocks)
        if ids.size < num_blocks:
            self._join()
            ids = np.concatenate((ids, take_in_turn(self._old, num_blocks - ids.size)))
        if self._knew_probation:
            self._on_probation[ids] = False
        return ids

    def take_one(self) -> int:
        """`take` of one block."""
        if not self._blank.num_free_blocks:
            return int(self.take(1)[0])
        self._num_free -= 1
        return self._blank.popleft()

    def release(self, ids: np.ndarray) -> None:
        """To the tail of the young ones."""
        self._young.append_distinct(ids)
        self._num_free += ids.size

    def release_few(self, ids: Sequence[int]) -> None:
        """`release` of a few blocks."""
        self._young.append_distinct(np.array(ids, np.int64))
        self._num_free += len(ids)

    def note_step_planned(self) -> None:
        """The young ones join the others."""
        self._lasting.note_step_planned()
        self._join()

    def _join(self) -> None:
        """The young ones join the other queues in the order of their release."""
        if self._young.num_free_blocks:
            parts = self._parts(self._young.take_all())
            for queue, ids in zip(self._old, parts, strict=True):
                if ids.size:
                    queue.append_distinct(ids)

    def _parts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those of int64[n] blocks that are blank, on probation, lasting."""
        hashed = self.index.is_hashed[ids]
        if not self._knew_probation:
            none = ids[:0]
            return (none, none, ids) if np.count_nonzero(hashed) == ids.size else (ids[~hashed], none, ids[hashed])
        on_probation = self._on_probation[ids]
        return ids[~hashed], ids[on_probation], ids[hashed & ~on_probation]

    def remove(self, ids: np.ndarray) -> None:
        """From the middle of their queues."""
        self._num_free -= ids.size
        remove_from(self._queues[::-1], ids)

    def order(self) -> np.ndarray:  # int32[num_free]
        """The queues one after another, of the young ones part by part."""
        blank, probation, lasting = self._parts(self._young.get_all_free_blocks())
        order = self._lasting.order_before(lasting)
        num_old = self._lasting.num_free_blocks
        old = (self._blank.get_all_free_blocks(), self._probation.get_all_free_blocks(), order[:num_old])
        return np.concatenate((*old, blank, probation, order[num_old:])).astype(np.int32)

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows that older blocks suffice for: what a step releases is young."""
        return flow.rows_within(self._num_old)

    def note_probation(self, ids: np.ndarray) -> None:
        """Where they go when they are released."""
        self._on_probation[ids] = True
        self._knew_probation = True

    def note_admission(self) -> None:
        """The lasting ones' clock goes on."""
        self._lasting.note_admission()

    def note_hit(self, ids: np.ndarray) -> None:
        """They are on probation no more."""
        self._on_probation[ids] = False
        self._lasting.note_use(ids)

    def note_evicted(self, ids: np.ndarray, hashes: list[BlockHash]) -> None:
        """The lasting ones' order remembers them."""
        self._lasting.note_eviction(ids, hashes)

    def note_lasting(self, ids: np.ndarray) -> None:
        """Free ones leave the queue of probation for the lasting, where they count as used now."""
        self._on_probation[ids] = False
        self._lasting.note_kept(ids[self._lasting.contains_n(ids)])
        free = ids[self._probation.contains_n(ids)]
        self._probation.remove_n(free)
        self._lasting.append_distinct(free)

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Free ones join the blank queue; young ones will."""
        self._on_probation[ids] = False
        free = ids[self._probation.contains_n(ids) | self._lasting.contains_n(ids)]
        remove_from(self._old, free)
        self._lasting.note_forgotten(ids)
        self._blank.append_distinct(free)

    def state(self) -> tuple[Any, ...]:
        """Lengths of the queues, the blocks on probation, the young ones in order, and the lasting ones' state."""
        lengths = tuple(queue.num_free_blocks for queue in self._queues)
        on_probation = tuple(np.flatnonzero(self._on_probation).tolist())
        young = tuple(self._young.get_all_free_blocks().tolist())
        return lengths, on_probation, young, self._lasting.state()

    def check_invariants(self) -> None:
        """Checks L1 to L3, and the queues."""
        for queue in self._queues:
            queue.check_invariants()
        num_queued = sum(queue.num_free_blocks for queue in self._queues)
        if num_queued != self._num_free:
            raise InvariantError(f"L3: {self._num_free} blocks are counted as free, {num_queued} are queued")
        blank, probation = self._blank.get_all_free_blocks(), self._probation.get_all_free_blocks()
        lasting = self._lasting.contains_n(np.arange(self.num_blocks))
        is_hashed, on_probation = self.index.is_hashed, self._on_probation
        if is_hashed[blank].any() or not (is_hashed[probation].all() and is_hashed[lasting].all()):
            raise InvariantError("L1: a blank block is hashed, or one of probation or lasting is not")
        if on_probation[lasting].any() or not on_probation[probation].all():
            raise InvariantError("L1: a lasting block is on probation, or one of probation is not")
        if (on_probation & ~is_hashed).any():
            raise InvariantError("L2: an unhashed block is on probation")


class ProbationLRUPolicy(ProbationPolicy):
    """Lasting blocks by LRU."""

    def __init__(self, index: HashedBlocks) -> None:
        super().__init__(index, LRUOrder(index.is_hashed.size))


class LearnedPolicy(ProbationPolicy):
    """Lasting blocks by what keeping them is worth, learned from hits, also of what is gone: `RunKeeper`.

    Where a group of the cache forgets they go by LRU: a checkpoint is worth nothing without its tokens, nor these
    without it, and what is used together stays together under LRU.
    """

    def __init__(self, index: HashedBlocks, max_ghosts: int = 20_000, learn_every: int = 200) -> None:
        """
        Args:
            index: of the pool.
            max_ghosts: evicted blocks that are remembered; 80 bytes each.
            learn_every: requests after which the order follows what happened since; about 0.3 ms each time.

        Raises:
            ValueError: one of them is below 1.
        """
        for name, value in (("max_ghosts", max_ghosts), ("learn_every", learn_every)):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self._learned: LearnedOrder | None = LearnedOrder(index, max_ghosts, learn_every)
        super().__init__(index, self._learned)

    def note_checkpoints(self) -> None:
        """Lasting blocks go by LRU."""
        self._learned = None
        self._set_lasting(LRUOrder(self.num_blocks))

    def learned(self) -> tuple[LearnedClass, ...]:
        """What is known of each class of runs; nothing under LRU."""
        return () if self._learned is None else self._learned.keeper.table.classes

    def describe(self) -> str:
        """A line for each class."""
        return "".join(f"\n  {each.describe()}" for each in self.learned())

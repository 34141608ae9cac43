"""Probation: nothing of use goes while there is anything that nobody asked for.

Queues, taken in this order; but for the lasting ones the block that was released longest ago goes first:

    blank       no hash: nothing is lost
    probation   kept in case somebody parts there (`note_probation`), and not hit yet
    lasting     all other hashed blocks, in an order of their own (`LastingBlocks`): LRU, or as was learned

Blocks that were released since the last step was planned, or a request freed, are young: they are taken when no other
is left. So a step that releases and takes blocks for many rows takes the same ones whether its rows are planned one by
one or at once, as long as older ones last. What was learned tells no young blocks.

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
from kvjax.core.eviction.queues import NO_IDS, make_queues, take_in_turn
from kvjax.core.eviction.ranked_policy import LASTING, PROBATION, Ids, RankClock, RankedPolicy
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import InvariantError

FEW = 2  # blocks of one queue: mostly a request has one that is not full


class ProbationPolicy(RankedPolicy):
    """Two `FreeKVCacheBlockQueue`s and `LastingBlocks`."""

    is_told_of_use: ClassVar[bool] = True
    knows_probation: ClassVar[bool] = True
    is_told_of_registrations: ClassVar[bool] = False

    def __init__(self, index: HashedBlocks, lasting: LastingBlocks) -> None:
        super().__init__(index)
        self._blank, self._probation = make_queues(2, self.num_blocks)
        self._set_lasting(lasting)
        self._num_free = self.num_blocks - 1
        self._on_probation = np.zeros(self.num_blocks, np.bool_)
        self._knew_probation = False  # whether any block was ever on probation

    def _set_lasting(self, lasting: LastingBlocks) -> None:
        """Chooses the order of lasting blocks while there are none."""
        self._lasting = lasting
        self._queues: tuple[FreeKVCacheBlockQueue | LastingBlocks, ...] = (self._blank, self._probation, lasting)

    @property
    def num_free(self) -> int:
        """Blocks of all queues."""
        return self._num_free

    @property
    def _num_old(self) -> int:
        return self._num_free - self._blank.num_young - self._probation.num_young - self._lasting.num_young

    @property
    def joins_releases(self) -> bool:
        """All join the tails of queues."""
        return True

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """From the heads of the queues, one after another, up to their young ones."""
        if not 0 <= num_blocks <= self._blank.num_free_blocks - self._blank.num_young:
            return self._take_in_turn(num_blocks)
        self._num_free -= num_blocks
        return self._blank.take(num_blocks)

    def _take_in_turn(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """`take` of more than there is in the first queue."""
        self.check_available(num_blocks)
        if (num_old := self._num_old) < num_blocks:
            ids = take_in_turn(self._queues, num_old)
            self.let_age()
            ids = np.concatenate((ids, take_in_turn(self._queues, num_blocks - num_old)))
        else:
            ids = take_in_turn(self._queues, num_blocks)
        self._num_free -= num_blocks
        if self._knew_probation:
            self._on_probation[ids] = False
        return ids

    def take_one(self) -> int:
        """`take` of one block."""
        blank = self._blank
        if blank.num_free_blocks == blank.num_young:
            return int(self._take_in_turn(1)[0])
        self._num_free -= 1
        return blank.popleft()

    def release(self, ids: np.ndarray) -> None:
        """To the tails of the queues."""
        self.release_known(ids, self.index.is_hashed[ids])

    def release_known(self, ids: np.ndarray, is_hashed: np.ndarray) -> None:
        """`release` of blocks that are known to be hashed or not."""
        self._num_free += ids.size
        blank, probation, lasting = self._parts(ids, is_hashed)
        if 0 < blank.size <= FEW:
            self._blank.append_few(blank.tolist(), are_young=True)
        elif blank.size:
            self._blank.append_distinct(blank, are_young=True)
        if probation.size:
            self._probation.append_distinct(probation, are_young=True)
        if lasting.size:
            self._lasting.append_distinct(lasting, are_young=True)
        if self.keeps_ranks:
            self._rank_released(blank, probation, lasting)

    def release_few(self, ids: Sequence[int], num_hashed: int) -> None:
        """`release` of a few blocks."""
        self._num_free += len(ids)
        blank: Sequence[int] = ()
        probation: Sequence[int] = ()
        if num_hashed < len(ids):
            is_hashed = self.index.is_hashed.item
            blank = [block_id for block_id in ids if not is_hashed(block_id)] if num_hashed else ids
            ids = [block_id for block_id in ids if is_hashed(block_id)] if num_hashed else ()
            self._blank.append_few(blank, are_young=True)
        if self._knew_probation and num_hashed:
            is_here = self._on_probation.item
            probation = [block_id for block_id in ids if is_here(block_id)]
            ids = [block_id for block_id in ids if not is_here(block_id)]
            self._probation.append_few(probation, are_young=True)
        if ids:
            self._lasting.append_few(ids, are_young=True)
        if self.keeps_ranks:
            self._rank_released(blank, probation, ids)

    def _rank_released(self, blank: Ids, probation: Ids, lasting: Ids) -> None:
        """Gives ranks to what joined the three queues."""
        if len(blank):
            self.ranks[blank] = 0
        if len(probation):
            self._rank(probation, PROBATION)
        if len(lasting):
            self._rank(lasting, LASTING)

    def note_step_planned(self) -> None:
        """No block is young any more."""
        self._lasting.note_step_planned()
        self.let_age()

    def let_age(self) -> None:
        """No block is young any more."""
        self._blank.num_young = self._probation.num_young = self._lasting.num_young = 0

    def _parts(self, ids: np.ndarray, is_hashed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Splits int64[n] blocks into blank ones, those on probation, and lasting ones."""
        blank, hashed = _split(ids, is_hashed)
        if not self._knew_probation:
            return blank, NO_IDS, hashed
        lasting, probation = _split(hashed, self._on_probation[hashed])
        return blank, probation, lasting

    def remove(self, ids: np.ndarray) -> None:
        """From the middle of their queues."""
        self._num_free -= ids.size
        for queue, part in zip(self._queues, self._parts(ids, self.index.is_hashed[ids]), strict=True):
            if part.size:
                queue.remove_distinct(part)

    def order(self) -> np.ndarray:  # int32[num_free]
        """The queues one after another, then their young ones."""
        queued = [queue.get_all_free_blocks() for queue in self._queues]
        num_old = [queue.num_free_blocks - queue.num_young for queue in self._queues]
        pairs = list(zip(queued, num_old, strict=True))
        parts = *(ids[:old] for ids, old in pairs), *(ids[old:] for ids, old in pairs)
        return np.concatenate(parts).astype(np.int32)

    @property
    def num_blank(self) -> int:
        """Blank blocks that are not young."""
        return self._blank.num_old

    def oldest_cached(self, num_blocks: int) -> np.ndarray:  # int64[k]
        """From the heads of probation and the lasting, up to their young ones."""
        probation = self._probation.peek(min(num_blocks, self._probation.num_old))
        if probation.size == num_blocks:
            return probation
        assert isinstance(self._lasting, LRUOrder)  # it keeps ranks
        return np.concatenate((probation, self._lasting.peek(min(num_blocks - probation.size, self._lasting.num_old))))

    def make_blank(self, ids: np.ndarray) -> None:
        """From their queues to the tail of the blank ones."""
        self.lose(ids)
        self.gain(ids)

    def gain(self, ids: np.ndarray) -> None:
        """To the tail of the blank ones."""
        self.let_age()
        self._rank(ids, LASTING)
        self._num_free += ids.size
        self._blank.append_distinct(ids)

    def lose(self, ids: np.ndarray) -> None:
        """From their queues."""
        self.remove(ids)
        if self._knew_probation:
            self._on_probation[ids] = False

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows that older blocks suffice for: what a step releases is young. Where that is not told, none may.

        Which pool gives up what is decided anew for each row; only blank blocks are the pool's own for sure.
        """
        if self.keeps_ranks:
            return flow.rows_within(self.num_blank)
        length = flow.rows_within(self._num_old)
        return length if self._lasting.tells_young else min(length, flow.rows_before(flow.released()[1]))

    def note_probation(self, ids: np.ndarray) -> None:
        """Where they go when they are released."""
        self._on_probation[ids] = True
        self._knew_probation = True

    def note_hit(self, ids: np.ndarray) -> None:
        """They are on probation no more."""
        if self._knew_probation:
            self._on_probation[ids] = False
        self._lasting.note_use(ids)

    def note_evicted(self, ids: np.ndarray, hashes: list[BlockHash]) -> None:
        """The lasting ones' order remembers them."""
        self._lasting.note_eviction(ids, hashes)

    def note_lasting(self, ids: np.ndarray) -> None:
        """Free ones leave the queue of probation for the lasting, where they count as used now; none is young then."""
        self._on_probation[ids] = False
        lasted, free = ids[self._lasting.contains_n(ids)], ids[self._probation.contains_n(ids)]
        if lasted.size:
            self.let_age()
            self._lasting.note_kept(lasted)
        if free.size:
            self.let_age()
            self._probation.remove_distinct(free)
            self._lasting.append_distinct(free)
        if self.keeps_ranks:
            self._rank(lasted, LASTING)
            self._rank(free, LASTING)

    def are_on_probation(self, ids: np.ndarray) -> np.ndarray:  # bool[n]
        """As they were told to be."""
        return self._on_probation[ids]

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Free ones join the blank queue; if there are any, no block is young then."""
        self._on_probation[ids] = False
        lasted, free = ids[self._lasting.contains_n(ids)], ids[self._probation.contains_n(ids)]
        self._lasting.remove_distinct(lasted)
        self._probation.remove_distinct(free)
        self._lasting.note_forgotten(ids)
        if lasted.size or free.size:
            self.let_age()
            blank = np.concatenate((lasted, free))
            self._blank.append_distinct(blank)
            if self.keeps_ranks:
                self.ranks[blank] = 0

    def state(self) -> tuple[Any, ...]:
        """Lengths of the queues, the blocks on probation, and the lasting ones' state."""
        lengths = tuple((queue.num_free_blocks, queue.num_young) for queue in self._queues)
        return lengths, tuple(np.flatnonzero(self._on_probation).tolist()), self._lasting.state()

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

    def note_admission(self) -> None:
        """The clock goes on."""
        if self._learned is not None:
            self._learned.note_admission()

    def note_checkpoints(self) -> None:
        """Lasting blocks go by LRU."""
        self._learned = None
        self._set_lasting(LRUOrder(self.num_blocks))

    def keep_ranks(self, clock: RankClock) -> None:
        """Lasting blocks go by LRU, which compares over pools."""
        self.note_checkpoints()
        super().keep_ranks(clock)

    def learned(self) -> tuple[LearnedClass, ...]:
        """What is known of each class of runs; nothing under LRU."""
        return () if self._learned is None else self._learned.keeper.table.classes

    def describe(self) -> str:
        """A line for each class."""
        return "".join(f"\n  {each.describe()}" for each in self.learned())


def _split(ids: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits int64[n] blocks into those without the flag and those with it; views if the first ones come first."""
    as_bytes = flags.tobytes()
    if (num_unset := as_bytes.find(1)) < 0:
        return ids, NO_IDS
    if as_bytes.find(0, num_unset) < 0:
        return (ids[:num_unset], ids[num_unset:]) if num_unset else (NO_IDS, ids)
    return ids[~flags], ids[flags]

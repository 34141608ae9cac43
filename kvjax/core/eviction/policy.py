"""What a block pool asks of the keeper of its free blocks.

Flow:    BlockPool.free_blocks -> [EvictionPolicy.release] -> [take] -> BlockPool.get_new_blocks
         BlockPool.touch -> [remove]: a free block that is hit leaves, wherever it stands

A policy holds exactly the free blocks of one pool (null never among them) and an order over them, which changes only
when it is called. Ids are int64 arrays of distinct blocks, checked by the pool.

A user's own policy subclasses `EvictionPolicy` and is given to `BlockPool` or `KVCacheManager` as a factory: anything
that makes one from the pool's `HashedBlocks`, such as the class itself. At first all blocks but 0 are
free and unhashed. Keep state in plain attributes, so that a pool can be copied.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.learned_table import LearnedClass
from kvjax.core.eviction.step_flow import StepFlow
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import OutOfBlocksError


class EvictionPolicy(abc.ABC):
    """The free blocks of one pool in eviction order. Owned by the pool; not thread-safe.

    Everything is said in bulk. `joins_releases`, `take_one`, `release_known` and `release_few` exist for speed: their
    defaults are right.
    """

    is_told_of_use: ClassVar[bool] = False  # whether the pool calls `note_registered`, `note_hit` and `note_forgotten`
    knows_probation: ClassVar[bool] = False  # whether `note_probation` and `note_lasting` change the order
    is_told_of_registrations: ClassVar[bool] = True  # False: told of use, it does without `note_registered`

    def __init__(self, index: HashedBlocks) -> None:
        self.index = index  # who has which hash; `index.is_hashed` is bool[num_blocks]

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, null included."""
        return self.index.is_hashed.size

    # -- what a policy decides ----------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def num_free(self) -> int:
        """Free blocks."""

    @abc.abstractmethod
    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Removes the next blocks of the order, still hashed if they were.

        Raises:
            OutOfBlocksError: fewer are free. Nothing is changed.
            ValueError: a negative number. Nothing is changed.
        """

    @abc.abstractmethod
    def release(self, ids: np.ndarray) -> None:
        """Adds blocks that became free; callers give those that should go first first: a request's last block."""

    @abc.abstractmethod
    def remove(self, ids: np.ndarray) -> None:
        """Removes free blocks, wherever they stand in the order."""

    @abc.abstractmethod
    def order(self) -> np.ndarray:  # int32[num_free]
        """The free blocks, next to be taken first. O(num_blocks)."""

    @abc.abstractmethod
    def bulk_equivalent(self, flow: StepFlow) -> int:
        """How many leading rows of a step may be planned at once.

        One by one, each row first releases and then takes. At once, all rows release and then all take. The answer is
        the number of leading rows for which both give every row the same blocks and leave the same state, and for
        which that holds of every shorter lead too. 0 is always right, and slow.
        """

    # -- what a policy may want to know -------------------------------------------------------------------------------

    def note_registered(self, ids: np.ndarray, starts: np.ndarray, block_size: int) -> None:
        """Held blocks got hashes: each caches `block_size` tokens from the token number `starts` (int64[n]) on."""
        return

    def note_checkpoints(self) -> None:
        """Some group of the cache forgets: its hits need checkpoints. Said before anything is registered."""
        return

    def note_probation(self, ids: np.ndarray) -> None:  # integer[...]
        """Registered blocks that a checkpoint keeps which nobody asked for yet: until a hit they are worth least."""
        return

    def note_lasting(self, ids: np.ndarray) -> None:
        """Registered blocks, free or held, are needed where a request ended: they are on probation no more."""
        return

    def are_on_probation(self, ids: np.ndarray) -> np.ndarray:  # bool[n]
        """Which of int64[n] hashed blocks are on probation."""
        return np.zeros(ids.size, np.bool_)

    def note_step_planned(self) -> None:
        """What follows is another step, or a request was freed."""
        return

    def note_admission(self) -> None:
        """A request is admitted: its hits, if there are any, come next."""
        return

    def note_evicted(self, ids: np.ndarray, hashes: list[BlockHash]) -> None:
        """Blocks that `take` returned lost these hashes: int64[n] and n of them."""
        return

    def note_hit(self, ids: np.ndarray) -> None:
        """Another request holds these blocks from now on; they are not free (any more)."""
        return

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Blocks, free or held, are no longer hits; not called for those that `take` returned."""
        return

    def state(self) -> Any:
        """Comparable: what beside the order decides what happens next."""
        return ()

    def learned(self) -> tuple[LearnedClass, ...]:
        """What the policy found out of each class of blocks, always the same classes; none where it learns nothing."""
        return ()

    def describe(self) -> str:
        """Lines for a person, each behind a line feed, on what the policy found out."""
        return ""

    def check_invariants(self) -> None:
        """Raises InvariantError if a law of the policy's own is broken. O(num_blocks)."""
        return

    # -- for speed ----------------------------------------------------------------------------------------------------

    @property
    def joins_releases(self) -> bool:
        """Whether one `release` of the blocks of several groups leaves what a call for each group leaves."""
        return False

    def take_one(self) -> int:
        """`take` of one block."""
        return int(self.take(1)[0])

    def release_known(self, ids: np.ndarray, is_hashed: np.ndarray) -> None:
        """`release` where it is known which of the blocks are hashed: bool[n]."""
        self.release(ids)

    def release_few(self, ids: Sequence[int], num_hashed: int) -> None:
        """`release` of a few blocks, `num_hashed` of them hashed, without the cost of arrays."""
        self.release(np.array(ids, np.int64))

    def check_available(self, num_blocks: int) -> None:
        """Raises as `take` does."""
        if num_blocks > self.num_free:
            raise OutOfBlocksError(f"needs {num_blocks} blocks, {self.num_free} free")
        if num_blocks < 0:
            raise ValueError(f"expected num_blocks >= 0, got {num_blocks}")

"""An order of eviction over the blocks of several pools: policies whose free blocks have ranks that compare.

Flow:    EvictionPolicy.release -> [RankedPolicy.ranks] -> SlabMemory: which pool gives up a slab

    rank 0                         blank: nothing is lost
    from `PROBATION` to `LASTING`  on probation, by the time of release
    from `LASTING` on              worth keeping, by the time of release; or blank, by the time when the pool got it

The clock is the pools' own: it counts ranks that were given. Of what is released at once the first is the lowest.
Were blocks that a pool was just given to count as old, two pools that grow would take them from each other in turns.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.policy import EvictionPolicy

Ids: TypeAlias = np.ndarray | Sequence[int]  # int64[n] blocks, or a few

PROBATION = 1
LASTING = 1 << 61


class RankClock:
    """Ranks that were given so far, by all policies that share the clock."""

    def __init__(self) -> None:
        self.now = 0


class RankedPolicy(EvictionPolicy):
    """A policy that gives ranks once `keep_ranks` was called, before any block is released."""

    def __init__(self, index: HashedBlocks) -> None:
        super().__init__(index)
        self._clock: RankClock | None = None
        self.ranks = np.zeros(0, np.int64)  # [num_blocks] of free blocks; of others any

    def keep_ranks(self, clock: RankClock) -> None:
        """All blocks are blank."""
        self._clock = clock
        self.ranks = np.zeros(self.num_blocks, np.int64)

    @property
    def keeps_ranks(self) -> bool:
        """Whether another pool may get the blocks."""
        return self._clock is not None

    def _rank(self, ids: Ids, least: int) -> None:
        """Gives blocks the next ranks from `least` on, in their order."""
        assert self._clock is not None  # `keeps_ranks`
        first, count = least + self._clock.now, len(ids)
        self.ranks[ids] = np.arange(first, first + count)
        self._clock.now += count

    @property
    @abc.abstractmethod
    def num_blank(self) -> int:
        """Free blocks without a hash that were not released in this step: what `take` takes first."""

    @abc.abstractmethod
    def oldest_cached(self, num_blocks: int) -> np.ndarray:  # int64[k]
        """The next hashed blocks of the order, at most `num_blocks`; none that was released in this step."""

    @abc.abstractmethod
    def let_age(self) -> None:
        """No block counts as released in this step any more."""

    @abc.abstractmethod
    def make_blank(self, ids: np.ndarray) -> None:
        """Hashed free blocks, about to lose their hashes, do as in `gain`."""

    @abc.abstractmethod
    def gain(self, ids: np.ndarray) -> None:
        """Blank blocks that others had come last of the blank ones, and rank as released now; none is young then."""

    @abc.abstractmethod
    def lose(self, ids: np.ndarray) -> None:
        """Free blocks, of which the hashed ones are about to lose their hashes, are other pools' from now on."""


__all__ = ["LASTING", "PROBATION", "Ids", "RankClock", "RankedPolicy"]

"""One pool's share of a memory: which slabs it has, and how many blocks of each are held.

Flow:    BlockPool -> [SlabPool.note_held, note_free, provide] -> SlabMemory
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from kvjax.core.eviction.ranked_policy import RankedPolicy
from kvjax.core.pool.block_pool import BlockPool


class SlabTaker(Protocol):
    """What a pool asks of the memory."""

    num_slabs: int
    num_whole: int  # at most as many slabs as have no held block
    owner: np.ndarray  # int8[num_slabs] numbers of pools

    def provide(self, taker: SlabPool, num_blocks: int) -> None:
        """`SlabPool.provide`."""


class SlabPool:
    """One pool of the memory, and what is known of its slabs. Blocks are ids of the pool."""

    def __init__(self, memory: SlabTaker, number: int, pool: BlockPool, blocks_per_slab: int) -> None:
        self.memory = memory
        self.number = number  # among the memory's pools
        self.pool = pool
        self.blocks_per_slab = blocks_per_slab
        self.num_held = np.zeros(self.memory.num_slabs, np.int64)  # of each slab, held blocks
        self.num_grown = 0  # running rows and groups that took blocks since a step was planned
        self.num_ahead = 0  # blocks that the next step may take

    @property
    def policy(self) -> RankedPolicy:
        """Of the pool."""
        return cast(RankedPolicy, self.pool.eviction_policy)

    def provide(self, num_blocks: int) -> None:
        """Sees to it that the pool's policy can take so many blocks, if that is possible; the caller takes them."""
        self.memory.provide(self, num_blocks)

    def note_growth(self, num_rows: int) -> None:
        """So many running rows took blocks, each in one group: the next step may do so again."""
        self.num_grown += num_rows

    def note_held(self, ids: np.ndarray) -> None:
        """int64[n] distinct blocks that were free are held from now on."""
        np.add.at(self.num_held, ids // self.blocks_per_slab, np.ones(ids.size, np.int64))  # int64 all: 3 times as fast
        self.memory.num_whole -= ids.size

    def note_free(self, ids: np.ndarray) -> None:
        """int64[n] distinct blocks that were held are free from now on."""
        np.subtract.at(self.num_held, ids // self.blocks_per_slab, np.ones(ids.size, np.int64))

    def whole_slabs(self) -> np.ndarray:  # int64[k]
        """Those without a held block, in ascending order."""
        return ((self.memory.owner == self.number) & (self.num_held == 0)).nonzero()[0]

    def is_whole(self, slab: int) -> bool:
        """Whether the pool has the slab, and holds no block of it."""
        return self.memory.owner.item(slab) == self.number and not self.num_held.item(slab)

    def blocks_of(self, slab: int) -> np.ndarray:  # int64[blocks_per_slab]
        """The blocks of a slab."""
        return np.arange(slab * self.blocks_per_slab, (slab + 1) * self.blocks_per_slab)

    def slabs_for(self, num_blocks: int) -> int:
        """Slabs that so many blocks fill, if not wholly."""
        return -(-num_blocks // self.blocks_per_slab)


__all__ = ["SlabPool", "SlabTaker"]

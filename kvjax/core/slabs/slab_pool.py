"""One pool's share of a memory: which slabs it has, and which of them have no held block.

Flow:    BlockPool -> [SlabPool.provide, note_hits] -> SlabMemory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from kvjax.core.eviction.ranked_policy import RankedPolicy
from kvjax.core.pool.block_pool import BlockPool

FEW_FREE = 8  # where one block of more is free, the free ones are counted


class SlabTaker(Protocol):
    """What a pool asks of the memory."""

    num_slabs: int
    owner: np.ndarray  # int8[num_slabs] numbers of pools

    def provide(self, taker: SlabPool, num_blocks: int) -> None:
        """`SlabPool.provide`."""

    def note_hits(self, taker: SlabPool, num_blocks: int) -> None:
        """`SlabPool.note_hits`."""


class SlabPool:
    """One pool of the memory, and what is known of its slabs. Blocks are ids of the pool."""

    def __init__(self, memory: SlabTaker, number: int, pool: BlockPool, blocks_per_slab: int) -> None:
        self.memory = memory
        self.number = number  # among the memory's pools
        self.pool = pool
        self.policy = cast(RankedPolicy, pool.eviction_policy)
        self.blocks_per_slab = blocks_per_slab
        self._offsets = np.arange(blocks_per_slab)
        self.num_grown = 0  # running rows and groups that took blocks since a step was planned
        self.num_ahead = 0  # blocks that the next step may take

    @property
    def ref_counts(self) -> np.ndarray:  # int32[num_slabs, blocks_per_slab]
        """Of all blocks, by slab."""
        return self.pool.ref_count.reshape(-1, self.blocks_per_slab)

    def provide(self, num_blocks: int) -> None:
        """Sees to it that the pool's policy can take so many blocks, if that is possible; the caller takes them."""
        self.memory.provide(self, num_blocks)

    def note_growth(self, num_rows: int) -> None:
        """So many running rows took blocks, each in one group: the next step may do so again."""
        self.num_grown += num_rows

    def note_hits(self, num_blocks: int) -> None:
        """So many blocks that were free are held from now on, without `provide`."""
        self.memory.note_hits(self, num_blocks)

    def slabs(self) -> np.ndarray:  # int64[k]
        """Those that the pool has, in ascending order."""
        return (self.memory.owner == self.number).nonzero()[0]

    def whole_slabs(self) -> np.ndarray:  # int64[k]
        """Those of `slabs` without a held block, in ascending order."""
        if FEW_FREE * self.policy.num_free < self.pool.num_blocks:
            num_free = np.bincount(self.policy.order() // self.blocks_per_slab)
            return (num_free == self.blocks_per_slab).nonzero()[0]
        slabs = self.slabs()
        return slabs[~self.ref_counts[slabs].any(1)]

    def is_whole(self, slab: int) -> bool:
        """Whether the pool has the slab, and holds no block of it."""
        if self.memory.owner.item(slab) != self.number:
            return False
        return not np.count_nonzero(
            self.pool.ref_count[slab * self.blocks_per_slab : (slab + 1) * self.blocks_per_slab]
        )

    def blocks_of(self, slabs: Sequence[int]) -> np.ndarray:  # int64[slabs * blocks_per_slab]
        """The blocks of slabs, one slab after another."""
        starts = np.array(slabs, np.int64) * self.blocks_per_slab
        return starts if self.blocks_per_slab == 1 else (starts[:, None] + self._offsets).ravel()

    def gain(self, slabs: Sequence[int]) -> None:
        """Free slabs become the pool's."""
        ids = self.blocks_of(slabs)
        self.policy.gain(ids)
        self.pool.num_elsewhere -= ids.size

    def lose(self, slabs: Sequence[int]) -> None:
        """Slabs without held blocks are the pool's no more; what they cache is lost."""
        ids = self.blocks_of(slabs)
        self.policy.lose(ids)
        self.pool.evict_free(ids)
        self.pool.num_elsewhere += ids.size

    def make_blank(self, ids: np.ndarray) -> None:
        """int64[n] hashed free blocks lose their hashes."""
        self.policy.make_blank(ids)
        self.pool.evict_free(ids)

    def slabs_for(self, num_blocks: int) -> int:
        """Slabs that so many blocks fill, if not wholly."""
        return -(-num_blocks // self.blocks_per_slab)


__all__ = ["SlabPool", "SlabTaker"]

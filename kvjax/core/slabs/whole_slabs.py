"""Which slabs of a pool have no held block, oldest first.

Flow:    BlockPool + ranks of its policy -> [WholeSlabs.oldest] -> SlabMemory

A slab is as old as the youngest of its blocks, and of equally old ones the first is taken first. Slabs are looked at
all at once, and the oldest of them noted; one that changed since is passed over when its turn comes. So the order may
miss a slab that became old since, never one that is in use.
"""

from __future__ import annotations

import numpy as np

from kvjax.core.slabs.slab_pool import SlabPool

HELD = 1 << 62  # above every rank
UNKNOWN = -1  # below every rank
FEW = 4  # slabs are checked faster one by one
NOTED = 32  # of the slabs without held blocks one of so many is noted


class WholeSlabs:
    """The slabs of one pool. Some 150 us for 250,000 blocks, each time that those noted are used up."""

    def __init__(self, slab_pool: SlabPool) -> None:
        self._of = slab_pool
        self._size = slab_pool.blocks_per_slab
        self._noted: list[tuple[int, int]] = []  # slab, rank; the oldest last
        self._num_checked = 0  # of those noted last, which are as they were
        self._num_free_at_none = -1  # free blocks when no slab was found, so that none is looked for again

    def oldest(self, may_look: bool = True) -> int:
        """The rank of the oldest slab without a held block, which `take` gives.

        `HELD`: there is none. `UNKNOWN`: those noted are used up, and slabs may not be looked at.
        """
        while self._noted:
            slab, rank = self._noted[-1]
            if self._num_checked or self._rank_of(slab) == rank:
                return rank
            self._noted.pop()
        if not may_look:
            return UNKNOWN
        num_free = self._of.policy.num_free
        if num_free < self._size or num_free <= self._num_free_at_none:
            return HELD
        self._note()
        self._num_free_at_none = -1 if self._noted else num_free
        return self._noted[-1][1] if self._noted else HELD

    def take(self) -> int:
        """The slab that `oldest` found, which leaves those noted."""
        self._num_checked = max(self._num_checked - 1, 0)
        return self._noted.pop()[0]

    def check(self, count: int) -> None:
        """Checks the next `count` of those noted at once; until `end_check` no slab may change."""
        noted = self._noted[-count:] if count >= FEW else []
        if not noted:
            return
        slabs, ranks = np.array(noted).T
        of, size = self._of, self._size
        is_same = (of.memory.owner[slabs] == of.number) & (of.policy.ranks.reshape(-1, size)[slabs].max(1) == ranks)
        is_same &= ~of.ref_counts[slabs].any(1)
        self._noted[-count:] = [pair for pair, same in zip(noted, is_same.tolist(), strict=True) if same]
        self._num_checked = int(np.count_nonzero(is_same))

    def end_check(self) -> None:
        """Slabs may change again."""
        self._num_checked = 0

    def look_again(self) -> None:
        """Slabs may have become whole since none was found."""
        self._num_free_at_none = -1

    def _note(self) -> None:
        whole = self._of.whole_slabs()
        ranks = self._of.policy.ranks.reshape(-1, self._size)[whole].max(1, initial=0)
        count = min(max(whole.size // NOTED, 8), whole.size)
        if count < whole.size:
            oldest = ranks <= np.partition(ranks, count)[count]
            whole, ranks = whole[oldest], ranks[oldest]
        order = np.lexsort((whole, ranks))[::-1]
        self._noted = list(zip(whole[order].tolist(), ranks[order].tolist(), strict=True))

    def _rank_of(self, slab: int) -> int:
        """`UNKNOWN`: some block is held, or not the pool's."""
        if not self._of.is_whole(slab):
            return UNKNOWN
        return int(np.maximum.reduce(self._of.policy.ranks[slab * self._size : (slab + 1) * self._size]))


__all__ = ["HELD", "UNKNOWN", "WholeSlabs"]

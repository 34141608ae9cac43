"""Least recently used: the block that was released longest ago goes first.

Source:  eviction order of vLLM v1/core/block_pool.py (free_blocks, get_new_blocks), v1/core/kv_cache_utils.py

A released block joins the tail of one queue, a hit leaves it from the middle. With `uncached_first`, as in vLLM since
0.24, blocks without a hash join the head instead, since nothing is lost by reusing them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.step_flow import StepFlow


class LRUPolicy(EvictionPolicy):
    """A `FreeKVCacheBlockQueue`. Costs are its costs: some 10 ns a block."""

    def __init__(self, index: HashedBlocks, uncached_first: bool = False) -> None:
        super().__init__(index)
        self.uncached_first = uncached_first
        self.queue = FreeKVCacheBlockQueue(self.num_blocks)
        self.queue.remove(0)

    @property
    def num_free(self) -> int:
        """Queued blocks."""
        return self.queue.num_free_blocks

    @property
    def joins_releases(self) -> bool:
        """At the tail; at the head a later release goes before an earlier one."""
        return not self.uncached_first

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """From the head."""
        return self.queue.take(num_blocks)

    def take_one(self) -> int:
        """From the head."""
        return self.queue.popleft()

    def release(self, ids: np.ndarray) -> None:
        """To the tail; with `uncached_first` unhashed blocks to the head, the first given first."""
        self.release_known(ids, self.index.is_hashed[ids])

    def release_known(self, ids: np.ndarray, is_hashed: np.ndarray) -> None:
        """`release` of blocks that are known to be hashed or not."""
        if self.uncached_first:
            self.queue.prepend_absent(ids[~is_hashed])
            ids = ids[is_hashed]
        self.queue.append_distinct(ids)

    def release_few(self, ids: Sequence[int], num_hashed: int) -> None:
        """`release` of a few blocks."""
        if self.uncached_first:
            self.release(np.array(ids, np.int64))
        else:
            self.queue.append_few(ids)

    def remove(self, ids: np.ndarray) -> None:
        """From the middle of the queue."""
        self.queue.remove_distinct(ids)

    def order(self) -> np.ndarray:  # int32[num_free]
        """The queue from its head."""
        return self.queue.get_all_free_blocks()

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """Rows that can all be given blocks that were free before the step: it frees blocks to the tail.

        A block freed to the head would be allocated next, to the row that freed it. So the rows end before the first
        that frees one there.
        """
        length = flow.rows_within(self.num_free)
        if self.uncached_first:
            ids, positions = flow.released()
            length = min(length, flow.rows_before(positions[~self.index.is_hashed[ids]]))
        return length

    def check_invariants(self) -> None:
        """Q1 and Q2 of the queue."""
        self.queue.check_invariants()

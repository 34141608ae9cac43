"""Free blocks in several queues, taken from one after another: what policies of segments share.

Flow:    SegmentedLRUPolicy, ProbationPolicy -> [make_queues, take_in_turn] -> FreeKVCacheBlockQueue
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.eviction.lasting_blocks import LastingBlocks

NO_IDS = np.empty(0, np.int64)


def make_queues(num_queues: int, num_blocks: int) -> list[FreeKVCacheBlockQueue]:
    """The first one has all blocks of a pool but 0, the others none."""
    queues = [FreeKVCacheBlockQueue(num_blocks) for _ in range(num_queues)]
    queues[0].remove(0)
    for queue in queues[1:]:
        queue.take(num_blocks)
    return queues


def take_in_turn(queues: Sequence[FreeKVCacheBlockQueue | LastingBlocks], num_blocks: int) -> np.ndarray:
    """`num_blocks` blocks (int64) that are not young from the heads of the queues, which have as many."""
    parts = []
    for queue in queues:
        if num_old := min(num_blocks, queue.num_free_blocks - queue.num_young):
            parts.append(queue.take(num_old))
            num_blocks -= num_old
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_IDS


__all__ = ["NO_IDS", "make_queues", "take_in_turn"]

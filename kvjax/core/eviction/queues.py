"""Free blocks in several queues, taken from one after another: what policies of segments share.

Flow:    SegmentedLRUPolicy, ProbationPolicy -> [make_queues, take_in_turn, remove_from] -> FreeKVCacheBlockQueue
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.eviction.lasting_blocks import LastingBlocks
from kvjax.core.eviction.young_blocks import YoungBlocks


def make_queues(num_queues: int, num_blocks: int) -> list[FreeKVCacheBlockQueue]:
    """The first one has all blocks of a pool but 0, the others none."""
    queues = [FreeKVCacheBlockQueue(num_blocks) for _ in range(num_queues)]
    queues[0].remove(0)
    for queue in queues[1:]:
        queue.take(num_blocks)
    return queues


def take_in_turn(
    queues: Sequence[FreeKVCacheBlockQueue | LastingBlocks], num_blocks: int
) -> np.ndarray:  # int64[<= num_blocks]
    """`num_blocks` blocks, or all if there are fewer, from the heads of the queues."""
    parts = []
    for queue in queues:
        count = min(num_blocks, queue.num_free_blocks)
        if count:
            parts.append(queue.take(count))
            num_blocks -= count
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def remove_from(queues: Sequence[FreeKVCacheBlockQueue | LastingBlocks | YoungBlocks], ids: np.ndarray) -> None:
    """Removes int64[n] blocks, each from the queue that has it; quickest where the first queues have all."""
    for queue in queues:
        if queue.num_free_blocks and ids.size:
            is_here = queue.contains_n(ids)
            num_here = np.count_nonzero(is_here)
            if num_here == ids.size:
                queue.remove_n(ids)
                return
            if num_here:
                queue.remove_n(ids[is_here])
                ids = ids[~is_here]


__all__ = ["make_queues", "remove_from", "take_in_turn"]

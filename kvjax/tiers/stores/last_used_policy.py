"""Which unit of the host goes next: the one whose last use is longest ago, wherever that use was.

Flow:    HostStore -> [LastUsedPolicy] -> BlockPool, its index

Units come to the host when their pools need the blocks, which says little of when they were used. A pool that is ample
for its kind sends old ones, and a small one sends fresh ones. By last use a request's tokens and the
checkpoint behind them stand side by side, whichever pools they were in, and go together: each is worth nothing without
the other.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.step_flow import StepFlow


class LastUsedPolicy(EvictionPolicy):
    """A heap by `last_used`, which the store writes before it frees a block. About 1 us a block."""

    def __init__(self, index: HashedBlocks) -> None:
        super().__init__(index)
        self.last_used = np.zeros(self.num_blocks, np.int64)
        self._fresh = np.arange(1, self.num_blocks)  # never taken; they go first
        self._heap: list[tuple[int, int, int]] = []  # last use, number of the release, block
        self._release_of: dict[int, int] = {}  # free blocks but fresh ones
        self._num_releases = 0

    @property
    def num_free(self) -> int:
        """Blocks that were released and neither taken nor removed."""
        return self._fresh.size + len(self._release_of)

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """From the top of the heap, what was removed passed over."""
        self.check_available(num_blocks)
        fresh, self._fresh = self._fresh[:num_blocks], self._fresh[num_blocks:]
        ids: list[int] = []
        while len(ids) < num_blocks - fresh.size:
            _, number, block_id = heapq.heappop(self._heap)
            if self._release_of.get(block_id) == number:
                del self._release_of[block_id]
                ids.append(block_id)
        return np.concatenate([fresh, np.array(ids, np.int64)])

    def release(self, ids: np.ndarray) -> None:
        """By last use; of equal ones the first released goes first."""
        for last_used, block_id in zip(self.last_used[ids].tolist(), ids.tolist(), strict=True):
            self._num_releases += 1
            self._release_of[block_id] = self._num_releases
            heapq.heappush(self._heap, (last_used, self._num_releases, block_id))

    def remove(self, ids: np.ndarray) -> None:
        """They stay in the heap, which is made anew when half of it is such."""
        self._fresh = self._fresh[~np.isin(self._fresh, ids)]
        for block_id in ids.tolist():
            self._release_of.pop(block_id, None)
        if len(self._heap) > 2 * len(self._release_of) + 64:
            self._heap = self._sorted()

    def order(self) -> np.ndarray:  # int32[num_free]
        """The heap, sorted."""
        return np.array([*self._fresh, *(block_id for _, _, block_id in self._sorted())], np.int32)

    def bulk_equivalent(self, flow: StepFlow) -> int:
        """None: the host plans no steps."""
        return 0

    def _sorted(self) -> list[tuple[int, int, int]]:
        return sorted(entry for entry in self._heap if self._release_of.get(entry[2]) == entry[1])


__all__ = ["LastUsedPolicy"]

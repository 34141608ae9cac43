"""Blocks registered while the current step is planned: their KV is not written yet.

Flow:    SingleTypeKVCacheManager.cache_blocks -> [FreshBlocks] -> lookups cut a hit before the first fresh block

With `same_step_hits=True` nothing is recorded, except by kinds whose state a same-step reader could not see.
"""

from __future__ import annotations

import numpy as np


class FreshBlocks:
    """The fresh blocks of one pool. `cut` costs nothing while there are none."""

    __slots__ = ("_ids", "_is_fresh")

    def __init__(self, num_blocks: int) -> None:
        self._is_fresh = np.zeros(num_blocks, bool)
        self._ids: list[np.ndarray] = []

    def add(self, block_ids: np.ndarray) -> None:
        """Marks int32[k] `block_ids` as registered in this step."""
        if block_ids.size:
            self._is_fresh[block_ids] = True
            self._ids.append(block_ids)

    def cut(self, block_ids: np.ndarray) -> int:
        """Length of the leading run of int32[k] `block_ids` without a fresh block."""
        if not self._ids:
            return int(block_ids.size)
        fresh = self._is_fresh[block_ids]
        return int(fresh.argmax()) if fresh.any() else int(block_ids.size)

    def are_fresh(self, block_ids: np.ndarray) -> np.ndarray:  # bool[k]
        """Which of int32[k] `block_ids` were registered in this step."""
        return self._is_fresh[block_ids]

    def clear(self) -> None:
        """Forgets all: a new step starts."""
        for ids in self._ids:
            self._is_fresh[ids] = False
        self._ids.clear()

    def block_ids(self) -> list[int]:
        """The fresh blocks in ascending order."""
        return np.flatnonzero(self._is_fresh).tolist()

"""Blocks that were released since the last step was planned, in order: written down at once, sorted later.

Flow:    ProbationPolicy.release -> [YoungBlocks] -> its queues, when a step is planned
"""

from __future__ import annotations

import numpy as np

from kvjax.errors import InvariantError


class YoungBlocks:
    """What each release gave, as it gave it. Owned by one policy. Ids are int64 arrays of distinct blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free_blocks = 0
        self._releases: list[np.ndarray] = []
        self._is_here = np.zeros(num_blocks, np.bool_)

    def append_distinct(self, ids: np.ndarray) -> None:
        """Adds blocks that are not here."""
        self._is_here[ids] = True
        self._releases.append(ids.copy())
        self.num_free_blocks += ids.size

    def contains_n(self, ids: np.ndarray) -> np.ndarray:  # bool[n]
        """Which blocks are here."""
        return self._is_here[ids]

    def remove_n(self, ids: np.ndarray) -> None:
        """Removes blocks that are here. O(blocks that are)."""
        self._is_here[ids] = False
        self._releases = [of_release[self._is_here[of_release]] for of_release in self._releases]
        self.num_free_blocks -= ids.size

    def get_all_free_blocks(self) -> np.ndarray:  # int64[n]
        """The blocks in the order of their release."""
        return np.concatenate(self._releases) if self._releases else np.zeros(0, np.int64)

    def take_all(self) -> np.ndarray:  # int64[n]
        """Removes all."""
        ids = self._releases[0] if len(self._releases) == 1 else self.get_all_free_blocks()
        self._is_here[ids] = False
        self._releases, self.num_free_blocks = [], 0
        return ids

    def check_invariants(self) -> None:
        """Raises InvariantError if the blocks are not those that are marked, or not as many as are counted."""
        ids = self.get_all_free_blocks()
        if sorted(ids.tolist()) != np.flatnonzero(self._is_here).tolist() or ids.size != self.num_free_blocks:
            raise InvariantError(f"{self.num_free_blocks} young blocks are counted, {ids.size} are here, or one twice")


__all__ = ["YoungBlocks"]

"""Free blocks that are worth keeping: what `ProbationPolicy` asks of the order in which they go.

Flow:    ProbationPolicy -> [LastingBlocks] -> block ids

Ids are int64 arrays of distinct hashed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.hashing.block_hash import BlockHash


class LastingBlocks(Protocol):
    """The blocks, and an order over them. Owned by one policy."""

    num_free_blocks: int
    num_young: int  # of them, the last of the order: released in this step; 0 where that is not told

    @property
    def tells_young(self) -> bool:
        """Whether young blocks are counted, and come last."""

    def append_distinct(self, ids: np.ndarray, are_young: bool = False) -> None:
        """Adds blocks that became free, each request's last one first; young ones age when `num_young` is set to 0."""

    def append_few(self, block_ids: Sequence[int], are_young: bool = False) -> None:
        """`append_distinct` of a few blocks."""

    def take(self, num_blocks: int) -> np.ndarray:  # int64[num_blocks]
        """Removes the next ones of the order; there are as many."""

    def contains_n(self, ids: np.ndarray) -> np.ndarray:  # bool[n]
        """Which blocks are here."""

    def remove_distinct(self, ids: np.ndarray) -> None:
        """Removes blocks that are here."""

    def get_all_free_blocks(self) -> np.ndarray:  # integer[num_free_blocks]
        """The blocks in order."""

    def note_kept(self, ids: np.ndarray) -> None:
        """Blocks that are here are needed where a request just ended."""

    def note_use(self, ids: np.ndarray) -> None:
        """Blocks that are held were hit, in the order of their prefixes."""

    def note_eviction(self, ids: np.ndarray, hashes: list[BlockHash]) -> None:
        """Blocks of these hashes were evicted."""

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Blocks lost their hashes, free or held; free ones have been removed."""

    def note_step_planned(self) -> None:
        """What follows is another step."""

    def state(self) -> Any:
        """Comparable: what beside the order decides what happens next."""

    def check_invariants(self) -> None:
        """Raises InvariantError if a law is broken. O(num_blocks)."""


class LRUOrder(FreeKVCacheBlockQueue):
    """`LastingBlocks` of which the one that was released longest ago goes first: an empty queue."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.take(num_blocks)

    @property
    def tells_young(self) -> bool:
        """They are those at the tail."""
        return True

    def note_kept(self, ids: np.ndarray) -> None:
        """They go to the tail."""
        self.remove_distinct(ids)
        self.append_distinct(ids)

    def note_use(self, ids: np.ndarray) -> None:
        """Changes nothing."""

    def note_eviction(self, ids: np.ndarray, hashes: list[BlockHash]) -> None:
        """Changes nothing."""

    def note_forgotten(self, ids: np.ndarray) -> None:
        """Changes nothing."""

    def note_step_planned(self) -> None:
        """Changes nothing."""

    def state(self) -> tuple[()]:
        """Nothing beside the order."""
        return ()


__all__ = ["LRUOrder", "LastingBlocks"]

"""What an eviction policy reads of its pool's prefix index.

Flow:    PrefixIndex -> [HashedBlocks] -> EvictionPolicy
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash


class HashedBlocks(Protocol):
    """Which blocks of a pool are registered, and under which hash. A pool's `PrefixIndex` is one."""

    is_hashed: np.ndarray  # bool[num_blocks]

    def hash_of(self, block_id: int) -> BlockHash | None:
        """The hash that a block is registered under."""

    def hashes_of(self, ids: np.ndarray) -> list[BlockHash]:
        """The hashes of hashed blocks."""

    @property
    def has_groups(self) -> bool:
        """Whether blocks are registered in more than one group."""

    def groups_of(self, ids: np.ndarray) -> np.ndarray:  # int32[n]
        """The groups that hashed blocks are registered in."""

    def is_found(self, block_id: int) -> bool:
        """Whether a lookup of the block's hash finds this block, and not another of the same hash."""

"""The tier of a connector that keeps no blocks by hash: it holds nothing, and is told in vain.

Flow:    BlockPool -> [NoTier]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core import BlockHash


class NoTier:
    """A `CacheTier` without blocks."""

    def before_reuse(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_ids: np.ndarray
    ) -> None:
        """`CacheTier.before_reuse`: the contents are lost."""

    def after_register(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_id: int
    ) -> None:
        """`CacheTier.after_register`."""

    def holds(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # bool[n]
        """`CacheTier.holds`: none."""
        return np.zeros(len(block_hashes), np.bool_)


__all__ = ["NoTier"]

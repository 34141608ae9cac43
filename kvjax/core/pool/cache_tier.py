"""A place beside the pools that keeps cached blocks: host memory, a disk, another machine.

Flow:    BlockPool, when a block is registered or reused -> [TierLink] -> CacheTier; lookups -> [TierLink] -> CacheTier
Source:  external tokens of vLLM v1/core/kv_cache_manager.py; the hooks are ours
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash


class CacheTier(Protocol):
    """What a manager asks of a tier. Called from the manager's thread; it changes nothing of the manager's.

    A tier knows blocks by hash and group, never by block id: an id means other contents after each reuse.
    """

    def before_reuse(
        self,
        pool_id: int,
        block_ids: np.ndarray,  # int64[n]
        block_hashes: Sequence[BlockHash],  # of each
        group_ids: np.ndarray,  # int32[n] of each
    ) -> None:
        """Cached blocks are taken for other contents: the last moment to plan a copy of their pages.

        Their pages stay as they are until the step that is being planned writes; a copy has to be read before.
        It must not raise, nor call the manager or its pools but for reading.
        """

    def after_register(
        self,
        pool_id: int,
        block_ids: np.ndarray,  # int[n], null blocks among them
        block_hashes: Sequence[BlockHash],  # of each
        group_id: int,
    ) -> None:
        """Blocks have become hits. The step that is being planned computes them, or one before it has.

        Where that step is taken back they cease to be, untold: ask the pool's `block_hash_of` before reading a page.
        It must not raise, nor call the manager or its pools.
        """

    def holds(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # bool[n]
        """Which blocks of a group can be loaded from here, at least until the request that is looked up is admitted."""


class TierLink:
    """One pool's way to the tier. No part of a saved state: a restored manager has the tier that it is given.

    Of blocks that are registered, held, free or about to be reused, it remembers

        on_probation    bool[num_blocks]: no checkpoint needs them and no hit has used them (core/kinds/probation.py)
        last_used       int64[num_blocks]: `clock`, which the tier moves on, when they were registered, hit or freed
    """

    def __init__(self, tier: CacheTier, pool_id: int, num_blocks: int) -> None:
        self._tier = tier
        self._pool_id = pool_id
        self.on_probation = np.zeros(num_blocks, np.bool_)
        self.last_used = np.zeros(num_blocks, np.int64)
        self.clock = 0

    def before_reuse(self, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_ids: np.ndarray) -> None:
        """`CacheTier.before_reuse` of blocks of this pool."""
        self._tier.before_reuse(self._pool_id, block_ids.copy(), block_hashes, group_ids.copy())

    def after_register(
        self,
        block_ids: np.ndarray,  # int[groups, n]
        block_hashes: Sequence[BlockHash],
        group_ids: Sequence[int],
    ) -> None:
        """`CacheTier.after_register` of blocks of this pool, with the same hashes in each group."""
        self.note_use(block_ids)
        for of_group, group_id in zip(block_ids, group_ids, strict=True):
            self._tier.after_register(self._pool_id, of_group.copy(), block_hashes, group_id)

    def note_use(self, block_ids: np.ndarray) -> None:
        """Blocks are registered, or hit."""
        self.on_probation[block_ids] = False
        self.last_used[block_ids] = self.clock

    def holds(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # bool[n]
        """`CacheTier.holds`."""
        return np.asarray(self._tier.holds(block_hashes, group_id), np.bool_)


__all__ = ["CacheTier", "TierLink"]

"""Admissions with a hit that ends inside a block, by hashes of hash blocks: the last block is copied for the request.

Flow:    SlotAllocator -> [InnerBlockHits] -> what a hit needs, whether it is still cached, columns to copy
Source:  partial hits of vLLM 0.33 v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.sub_block_hits import PartialBlocks
from kvjax.core.requests.request import Request


class InnerBlockHits:
    """The part of `SubBlockHits` that admissions ask. Owned by one `KVCacheManager`."""

    def __init__(self, groups: GroupManagers) -> None:
        self._groups = groups
        self.granularity = groups.hashing.hash_block_size  # tokens of which the length of every hit is a multiple

    def serves(self, request: Request, group_id: int, block_id: int, column: int, num_tokens: int) -> bool:
        """Whether a block is cached with the tokens of the request's block `column` up to `num_tokens`."""
        manager, _ = self._groups.place_of_group(group_id)
        end = num_tokens if manager.holds_states else (column + 1) * manager.block_size
        hashes = request.block_hashes[num_tokens // self.granularity - 1 : end // self.granularity]
        hash_map = manager.block_pool.hash_maps[group_id]
        return any(hash_map.contains(block_hash, block_id) for block_hash in hashes)

    def partial_blocks(self, hits: Sequence[np.ndarray], num_tokens: int, total_computed: int) -> PartialBlocks:
        """Which blocks of a hit of `num_tokens` tokens are partly used, as far as tokens after `total_computed` see.

        Each needs a copy.
        """
        places, num_held = [], [0] * len(self._groups.pools)
        for index, manager in enumerate(self._groups.managers):
            column = num_tokens // manager.block_size
            first = manager.get_num_skipped_tokens(total_computed) // manager.block_size
            if not num_tokens % manager.block_size or column < first or not manager.is_prefix_cacheable:
                continue
            places += [(index, place, column) for place in range(manager.num_groups)]
            num_held[self._groups.pool_ids[index]] += manager.num_groups
        return PartialBlocks(tuple(places), tuple(num_held), (0,) * len(num_held))

    def split(self, row: int, partial: PartialBlocks, copies: bool) -> None:
        """Has a new row, which holds the hit, get copies of the partly used blocks with its first blocks."""
        for index, _, column in partial.places:
            manager = self._groups.managers[index]
            manager.num_cached_blocks[row] = column
            manager.first_copies[row] = column


__all__ = ["InnerBlockHits"]

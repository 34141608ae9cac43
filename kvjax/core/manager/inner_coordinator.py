"""Hits of several groups that may end inside blocks: at any multiple of the hash block size.

Flow:    PrefixHits -> [InnerKVCacheCoordinator] -> a scan per manager -> blocks per group, tokens
Source:  HybridKVCacheCoordinator of vLLM 0.33 v1/core/kv_cache_coordinator.py (enable_partial_hash_hits)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.inner_scans import InnerRunScan, InnerStateScan
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.manager.coordinator import Hit, KVCacheCoordinator, agreed_length


class InnerKVCacheCoordinator(KVCacheCoordinator):
    """As `HybridKVCacheCoordinator`, but a hit's last block may be used in part.

    With EAGLE a hit of full attention drops one hash block, that of states nothing.
    """

    def __init__(self, groups: GroupManagers) -> None:
        super().__init__(groups)
        self._unit = groups.alignment
        self._cacheable = [i for i, manager in enumerate(self.managers) if manager.is_prefix_cacheable]

    def start_scan(self, index: int, block_hashes: Sequence[BlockHash], max_length: int) -> HitScan:
        """A scan of one manager's groups."""
        manager, drops = self.managers[index], self.drops_last_block[index]
        if manager.holds_states:
            return InnerStateScan(manager, block_hashes, self._unit)
        hashes = self.hashing.of_block_size(block_hashes, manager.block_size)
        if not manager.forgets:
            return InnerRunScan(manager, block_hashes, hashes, self._unit, drops)
        return manager.start_scan(PrefixLookup(hashes, max_length, self._unit, drops, self.needs_last_block))

    def limit(self, index: int, block_hashes: Sequence[BlockHash], length: int) -> int:
        """Tokens that a scan looks at for a hit of at most `length`: what is dropped may lie behind it."""
        if not self.drops_last_block[index] or self.managers[index].holds_states:
            return length
        return min(length + self._unit, len(block_hashes) * self._unit)

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The greatest common hit of all groups."""
        scans = {index: self.start_scan(index, block_hashes, max_length) for index in self._cacheable}
        first = [index for index in self._cacheable if not self.managers[index].forgets]
        others = [index for index in self._cacheable if self.managers[index].forgets]
        length = max_length

        def ask(index: int, length: int) -> int:
            return scans[index].longest(self.limit(index, block_hashes, length))

        for index in first or others[:1]:
            length = ask(index, length)
        shared = length
        length = agreed_length(ask, others, length)
        if not length:
            return self.no_ids, 0, shared
        for index in first:  # they are cut at the end
            scans[index].longest(length)
        hits = [scans[i].ids() if i in scans else manager.no_blocks for i, manager in enumerate(self.managers)]
        return self.groups.by_group(hits), length, shared

    def find_each(
        self, block_hashes: Sequence[BlockHash], max_length: int
    ) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
        """Per group its own longest hit, int32[k], and its tokens, whatever the others have."""
        ids, lengths = [manager.no_blocks for manager in self.managers], [0] * len(self.managers)
        for index in self._cacheable:
            scan = self.start_scan(index, block_hashes, max_length)
            lengths[index] = scan.longest(self.limit(index, block_hashes, max_length))
            ids[index] = scan.ids() if lengths[index] else ids[index]
        by_group = self.groups.by_group([[n] * m.num_groups for n, m in zip(lengths, self.managers, strict=True)])
        return self.groups.by_group(ids), by_group


__all__ = ["InnerKVCacheCoordinator"]

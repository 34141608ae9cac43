"""Hits that end inside a block: the first part of a cached block is reused by copying its page.

Flow:    request -> [SubBlockHits.find] -> blocks, the last one partly used -> SlotAllocator -> [split] -> page copies
Source:  ARCHITECTURE.md, "Hits inside blocks"; SGLang and vLLM issues on hits lost to large blocks

A hit of n tokens is good if every group has cached the blocks that token n attends to. The last of them may reach
beyond n: any cached block will do that continues the same prefix and begins with the same tokens. Where the hit ends
inside a block, token n is written into that block, which therefore counts as attended to. Its first part is valid for
the new request, because the KV of a token depends only on the tokens before it. And n must be a multiple of what each
group can cut at (`granularity_of`): one token; the tokens of one compressed state of each layer; a whole block of a
recurrent kind, whose state is that of its last token.

A new request gets a page of its own with a copy. Where no block is free for it, a source that nobody holds becomes the
request's own block and is no hit any more, so that a hit never makes an admission harder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.manager.coordinator import Hit
from kvjax.core.manager.sub_block_scan import SubBlockScan
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class PartialBlocks:
    """The partly used blocks of a hit."""

    places: tuple[tuple[int, int, int], ...]  # (index of the manager, place of the group, column)
    num_held: tuple[int, ...]  # per pool, partly used blocks that somebody holds: they need a copy
    num_free: tuple[int, ...]  # per pool, of the others: they may be copied or taken over


class SubBlockHits:
    """Lookups and copies within blocks over all groups. Owned by one `KVCacheManager`."""

    def __init__(self, groups: GroupManagers, kv_cache_config: KVCacheConfig) -> None:
        specs = kv_cache_config.kv_cache_groups
        self._groups = groups
        self._managers = [(i, m) for i, m in enumerate(groups.managers) if m.is_prefix_cacheable]
        self.granularity = lcm(*(granularity_of(m, specs[i]) for _, m in self._managers for i in m.group_ids))

    # Lookup.

    def find(self, request: Request, max_length: int) -> Hit:
        """The longest prefix of at most `max_length` tokens that every group can resume from, cut inside blocks."""
        length = max_length - max_length % self.granularity
        scans: dict[int, HitScan] = {}
        agreed = turn = 0
        while length and agreed < len(self._managers):
            index, manager = self._managers[turn % len(self._managers)]
            if index not in scans:
                scans[index] = self._start_scan(manager, request, length)
            shorter = scans[index].longest(length)
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            turn += 1
        hits = [
            scans[i].ids()[:, : -(-length // manager.block_size)] if i in scans else manager.no_blocks
            for i, manager in enumerate(self._groups.managers)
        ]
        return self._groups.by_group(hits), length, length

    def _start_scan(self, manager: SingleTypeKVCacheManager, request: Request, max_length: int) -> HitScan:
        size = manager.block_size
        hashes = self._groups.hashing.of_block_size(request.block_hashes, size)
        if manager.sub_blocks is None:
            return manager.start_scan(PrefixLookup(hashes, max_length, lcm(size, self.granularity), False))
        return SubBlockScan(manager, request, hashes, self.granularity, self._groups.needs_last_block)

    def serves(self, request: Request, group_id: int, block_id: int, column: int, num_tokens: int) -> bool:
        """Whether a block is cached and begins with the tokens of the request's block `column` up to `num_tokens`."""
        manager, _ = self._groups.place_of_group(group_id)
        index = manager.block_pool.prefix_index
        if manager.sub_blocks is None or not index.is_hashed[block_id] or index.group_of(block_id) != group_id:
            return False
        hashes = self._groups.hashing.of_block_size(request.block_hashes, manager.block_size)
        block_hash, needed = index.hash_of(block_id), num_tokens - column * manager.block_size
        for _, other in manager.sub_blocks.find(request, hashes, column, needed, least=needed):
            if other == block_hash:
                return True
        return False

    # Allocation.

    def partial_blocks(self, hits: Sequence[np.ndarray], num_tokens: int, total_computed: int) -> PartialBlocks:
        """Which blocks of a hit of `num_tokens` tokens are partly used, as far as tokens after `total_computed` see."""
        pools = self._groups.pools
        places, num_held, num_free = [], [0] * len(pools), [0] * len(pools)
        for index, manager in self._managers:
            column, pool_id = num_tokens // manager.block_size, self._groups.pool_ids[index]
            first = manager.get_num_skipped_tokens(total_computed) // manager.block_size
            if not num_tokens % manager.block_size or column < first:
                continue
            for place, group_id in enumerate(manager.group_ids):
                places.append((index, place, column))
                is_held = pools[pool_id].ref_count[hits[group_id][column]] > 0
                num_held[pool_id] += bool(is_held)
                num_free[pool_id] += not is_held
        return PartialBlocks(tuple(places), tuple(num_held), tuple(num_free))

    def split(self, row: int, partial: PartialBlocks, copies: bool) -> None:
        """Gives a new row, which holds the hit, copies of the partly used blocks, or the blocks themselves."""
        for index, place, column in partial.places:
            manager = self._groups.managers[index]
            pool, block_id = manager.block_pool, manager.block_tables.item(place, row, column)
            manager.num_cached_blocks[row] = column
            if not copies and pool.ref_count[block_id] == 1:
                pool.evict_blocks([block_id], was_reused=True)
            else:
                manager.block_tables[place, row, column] = pool.page_edits.exchange_for_copies([block_id])[0]


def granularity_of(manager: SingleTypeKVCacheManager, group: KVCacheGroupSpec) -> int:
    """Tokens that the length of a hit that ends inside a block has to be a multiple of, for one group."""
    return lcm(*group.tokens_per_state) if manager.supports_sub_block_hits else manager.block_size


__all__ = ["PartialBlocks", "SubBlockHits", "granularity_of"]

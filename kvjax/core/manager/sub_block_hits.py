"""Hits that end inside a block: the first part of a cached block is reused by copying its page.

Flow:    request -> [SubBlockHits.find] -> blocks, the last one partly used -> SlotAllocator -> [split] -> page copies
Source:  ARCHITECTURE.md, "Hits inside blocks"; SGLang and vLLM issues on hits lost to large blocks

A hit of n tokens is good if every group has cached the blocks that token n attends to, the last one perhaps beyond n:
some cached block that continues the same prefix and begins with the same tokens. Token n writes behind the first n of
its block, so where the hit ends inside one, that block counts as attended to. Its first part is valid for the new
request, because the KV of a token depends on the tokens before it alone. So any n is good that is a multiple of what
each group can cut at (`granularity_of`): one token; the tokens of one compressed state of each layer; a whole block of
a recurrent kind, whose state is that of its last token.

A new request gets a page of its own with a copy. Where no block is free for it, a source that nobody holds becomes the
request's own block and is no hit any more, so that a hit never makes an admission harder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.prefix_lookup import PrefixLookup
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.manager.coordinator import Hit
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class PartialBlocks:
    """The partly used blocks of a hit."""

    places: tuple[tuple[int, int, int], ...]  # (index of the manager, place of the group, column)
    num_held: tuple[int, ...]  # per pool, of those that somebody holds: they need a copy
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
        found = {i: np.empty((manager.num_groups, 0), np.int32) for i, manager in enumerate(self._groups.managers)}
        agreed = turn = 0
        while length and agreed < len(self._managers):
            index, manager = self._managers[turn % len(self._managers)]
            found[index], shorter = self._ask(manager, request, length)
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            turn += 1
        cut = [found[i][:, : -(-length // manager.block_size)] for i, manager in enumerate(self._groups.managers)]
        return self._groups.by_group(cut), length

    def _ask(self, manager: SingleTypeKVCacheManager, request: Request, limit: int) -> tuple[np.ndarray, int]:
        """int32[G, k] blocks of the manager's longest hit of at most `limit` tokens, and its tokens."""
        size = manager.block_size
        hashes = self._groups.hashing.of_block_size(request.block_hashes, size)
        if not manager.supports_sub_block_hits:
            ids = manager.find_longest_cache_hit(PrefixLookup(hashes, limit, lcm(size, self.granularity), False))
            return ids, ids.shape[1] * size
        column = min((limit - 1) // size, len(hashes))
        if manager.hits_are_prefix_closed:
            column = min(column, manager.cached_run(hashes[: column + 1]).shape[1])
        while column >= 0:
            if self._sees_nothing(manager, edge := (column + 1) * size, limit):
                return np.zeros((manager.num_groups, column + 1), np.int32), edge
            last, end = self._reach(manager, request, hashes, column, min(limit, (column + 1) * size))
            if last is not None:
                first = max(min(manager.get_num_skipped_tokens(end) // size, column), 0)
                run = manager.cached_run(hashes[first:column])
                if run.shape[1] == column - first:
                    nulls = np.zeros((manager.num_groups, first), np.int32)
                    return np.concatenate([nulls, run, last[:, None]], axis=1), end
                column = first + run.shape[1]  # whose block is missing: it may still have a part
            else:
                column -= 1
        return np.empty((manager.num_groups, 0), np.int32), 0

    def _sees_nothing(self, manager: SingleTypeKVCacheManager, edge: int, limit: int) -> bool:
        """Whether a hit may end at the block edge `edge` with no block of the manager, as where a chunk begins."""
        if edge > limit or edge % self.granularity or self._groups.needs_last_block:
            return False
        return manager.get_num_skipped_tokens(edge) == edge

    def _reach(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        hashes: Sequence[BlockHash],
        column: int,
        limit: int,
    ) -> tuple[np.ndarray | None, int]:
        """int32[G] blocks that serve the most tokens of a column up to token `limit`, and where these end; or None."""
        start = column * manager.block_size
        assert manager.sub_blocks is not None  # the option is on
        for num_tokens, block_hash in manager.sub_blocks.find(request, hashes, column, limit - start):
            end = start + num_tokens
            end -= end % self.granularity
            if end <= start:  # the best come first: no later one reaches further
                break
            block = manager.cached_run([block_hash])
            if block.shape[1]:
                return block[:, 0], end
        return None, 0

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

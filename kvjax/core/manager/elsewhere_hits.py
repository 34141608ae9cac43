"""How far a hit would reach if blocks that lie in a tier were loaded, and which blocks those are.

Flow:    PrefixHits -> [find_elsewhere] -> KVCacheBlocks.elsewhere -> allocate_slots(num_external_computed_tokens=...)
Source:  external tokens of vLLM v1/core/kv_cache_manager.py

    | hit: blocks of the pool | elsewhere: new blocks, to be loaded | to be computed |
                              hit's tokens                          a length that every group accepts

Every block behind the hit gets a page of its own, so each must be found somewhere: in the tier, or still in the pool.
A block of the pool may be reused by the very allocation that loads it; the pool has then shown it to the tier first.
"""

from __future__ import annotations

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.pool.kv_cache_blocks import NO_BLOCK_IDS, ElsewhereBlocks, ElsewhereHit
from kvjax.core.requests.request import Request

NO_BLOCKS = ElsewhereBlocks(0, (), NO_BLOCK_IDS)


def find_elsewhere(groups: GroupManagers, request: Request, num_hit_tokens: int) -> ElsewhereHit | None:
    """What lies behind a hit of so many tokens and can be loaded; None: nothing that makes it longer.

    Costs some microseconds, and 0.2 us for each block behind the hit.
    """
    lookups, alignment = groups.cacheable_lookups, groups.alignment
    longest = groups.longest_hit(request)
    most = min((longest - drops * manager.block_size for manager, drops in lookups), default=0)
    lengths = np.arange(num_hit_tokens - num_hit_tokens % alignment + alignment, most + 1, alignment)
    behind: list[_BlocksBehind] = []
    for manager, drops in lookups:
        for group_id in manager.group_ids if lengths.size else ():
            behind.append(_BlocksBehind(groups, manager, group_id, request, num_hit_tokens))
            lengths = behind[-1].reachable(lengths, drops and not manager.holds_states)
    if not lengths.size:
        return None
    length, parts = lengths.item(-1), [NO_BLOCKS] * groups.num_groups
    for blocks in behind:
        parts[blocks.group_id] = blocks.needed(length)
    return ElsewhereHit(length - num_hit_tokens, tuple(parts))


class _BlocksBehind:
    """The blocks of one group behind a hit, and where each can be found."""

    def __init__(
        self,
        groups: GroupManagers,
        manager: SingleTypeKVCacheManager,
        group_id: int,
        request: Request,
        num_hit_tokens: int,
    ) -> None:
        self.group_id = group_id
        self._manager = manager
        self._needs_last_block = groups.needs_last_block
        self._first = num_hit_tokens // manager.block_size  # column
        hashes = groups.hashing.of_block_size(request.block_hashes, manager.block_size)
        self._hashes = list(hashes[self._first :])
        ids = manager.block_pool.find_each(self._hashes, group_id)
        found = ids >= 0
        found[found] = ~manager.fresh_blocks.are_fresh(ids[found])  # others are computed in this step
        self._ids = np.where(found, ids, -1).astype(np.int32)
        link = manager.block_pool.tier_link
        missing = ~found if link is None else ~found & ~link.holds(self._hashes, group_id)
        self._num_missing = np.concatenate(([0], np.cumsum(missing)))  # among the first blocks, of each number

    def reachable(self, lengths: np.ndarray, needs_dropped: bool) -> np.ndarray:
        """The int64[n] lengths whose blocks are all found; with `needs_dropped` the block behind the length too."""
        ends = lengths // self._manager.block_size + needs_dropped - self._first
        known = ends <= len(self._hashes)
        lengths, ends = lengths[known], ends[known]
        return lengths[self._num_missing[ends] == self._num_missing[self._starts(lengths)]]

    def needed(self, length: int) -> ElsewhereBlocks:
        """The blocks that a hit of `length` tokens needs."""
        start = self._starts(np.array([length])).item()
        part = slice(start, length // self._manager.block_size - self._first)
        return ElsewhereBlocks(self._first + start, tuple(self._hashes[part]), self._ids[part])

    def _starts(self, lengths: np.ndarray) -> np.ndarray:
        """The first of these blocks that each of int64[n] lengths needs."""
        size = self._manager.block_size
        columns = self._manager.get_num_skipped_tokens(lengths) // size
        columns = np.minimum(columns, lengths // size - self._needs_last_block)
        return np.maximum(columns - self._first, 0)


__all__ = ["find_elsewhere"]

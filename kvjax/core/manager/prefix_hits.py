"""What of a request is cached: the hit that it starts from, the one that a pin keeps, and how often there was any.

Flow:    KVCacheManager.get_computed_blocks, pin -> [PrefixHits] -> KVCacheCoordinator or SubBlockHits -> KVCacheBlocks
Source:  get_computed_blocks of vLLM v1/core/kv_cache_manager.py
"""

from __future__ import annotations

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.coordinator import KVCacheCoordinator
from kvjax.core.manager.elsewhere_hits import find_elsewhere
from kvjax.core.manager.never_hits import warn_if_never_hit
from kvjax.core.manager.sub_block_hits import SubBlockHits
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.pool.kv_cache_blocks import FoundHit, KVCacheBlocks
from kvjax.core.requests.hasher_check import HasherCheck
from kvjax.core.requests.request import Request
from kvjax.core.watch.prefix_cache_stats import PrefixCacheStats
from kvjax.core.watch.recent_lookups import RecentLookups


class PrefixHits:
    """Lookups of one `KVCacheManager`, which owns it; they change no block."""

    def __init__(
        self,
        groups: GroupManagers,
        coordinator: KVCacheCoordinator,
        sub_block_hits: SubBlockHits | None,
        hasher_check: HasherCheck,
        miss_reasons: MissReasons | None,
    ) -> None:
        warn_if_never_hit(groups)
        self._groups = groups
        self._looks_up = groups.options.enable_caching
        self._coordinator = coordinator
        self._sub_block_hits = sub_block_hits
        self._hasher_check = hasher_check
        self._miss_reasons = miss_reasons
        self._stats = PrefixCacheStats() if groups.options.log_stats else None
        self._waiting: RecentLookups[tuple[int, int]] = RecentLookups()  # tokens, and those of them found

    @property
    def smallest(self) -> int:
        """Tokens of the shortest hit that there can be; 0 without prefix caching."""
        if not self._groups.options.enable_caching or not self._groups.cacheable:
            return 0
        return self._groups.alignment if self._sub_block_hits is None else self._sub_block_hits.granularity

    def find(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """`KVCacheManager.get_computed_blocks`."""
        if not self._looks_up or request.skip_reading_prefix_cache:
            return self._not_looked_up(request)
        self._hasher_check.check_hasher(request)
        if self._groups.reads_encoder and not self._names_input(request):
            return self._not_looked_up(request)
        longest = self._groups.longest_hit(request)
        if self._sub_block_hits is not None:
            hits, num_tokens, shared = self._sub_block_hits.find(request, longest)
        else:
            hits, num_tokens, shared = self._coordinator.find_longest_cache_hit(request.block_hashes, longest)
        if self._stats is not None:
            self._waiting.note(request.request_id, (request.num_tokens, num_tokens))
        if self._miss_reasons is not None:
            self._miss_reasons.explain(request, num_tokens)
        shared = shared if shared > num_tokens and self._groups.retention is not None else 0
        elsewhere = find_elsewhere(self._groups, request, num_tokens) if self._groups.has_tier else None
        if not num_tokens and not shared and elsewhere is None:
            return self._groups.no_blocks, 0
        found = FoundHit(request.block_hashes, num_tokens, self._groups.num_losses)
        for ids in hits:  # which an admission takes at their word
            ids.setflags(write=False)
        return KVCacheBlocks(hits, self._groups.pool_of_group, shared, found, elsewhere), num_tokens

    def find_to_pin(self, request: Request) -> tuple[tuple[np.ndarray, ...], int]:
        """The hit that a longer request with these tokens would get, with the blocks that EAGLE drops from it.

        Raises:
            ValueError: the request was hashed with another block size.
        """
        self._hasher_check.check_hasher(request)
        if self._groups.reads_encoder and not self._names_input(request):
            return self._groups.no_ids, 0
        hashes = request.block_hashes
        hits, length, _ = self._coordinator.find_longest_cache_hit(hashes, request.num_tokens)
        blocks = list(hits)
        for manager, drops in self._groups.cacheable_lookups if length else ():
            if drops:
                column = length // manager.block_size
                dropped = self._groups.hashing.of_block_size(hashes, manager.block_size)[column : column + 1]
                for group_id in manager.group_ids:
                    block = manager.block_pool.find_run(dropped, group_id)
                    blocks[group_id] = np.concatenate([hits[group_id], block])
        return tuple(blocks), length

    def note_admission(self, request: Request) -> None:
        """Counts the latest lookup of a request that has got its first slots."""
        if self._stats is not None:
            looked_up = self._waiting.take(request.request_id)
            if looked_up is not None:
                self._stats.record(*looked_up, preempted=request.num_preemptions > 0)
        if self._miss_reasons is not None:
            self._miss_reasons.count_admission(request)

    def note_reset(self) -> None:
        """The prefix cache was emptied."""
        if self._stats is not None:
            self._stats.reset = True

    def take_stats(self) -> PrefixCacheStats | None:
        """Lookups of requests admitted since the last call; None where they are not counted."""
        stats = self._stats
        if stats is not None:
            self._stats = PrefixCacheStats()
        return stats

    def _names_input(self, request: Request) -> bool:
        """Whether the request's hashes tell its KV where layers read an encoder: they must name its input."""
        return request.names_input(self._groups.hashing.hash_block_size)

    def _not_looked_up(self, request: Request) -> tuple[KVCacheBlocks, int]:
        if self._miss_reasons is not None:
            self._miss_reasons.explain_off(request)
        return self._groups.no_blocks, 0


__all__ = ["PrefixHits"]

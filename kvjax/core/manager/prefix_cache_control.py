"""What a `KVCacheManager` does with its cached blocks as a whole: forgets them, and tells of them.

Source:  names of vLLM v1/core/kv_cache_manager.py; `invalidate` and `stop_registering` are ours
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from kvjax.core.hashing.extra_keys import LoRARequest
from kvjax.core.manager.coordinator import KVCacheCoordinator
from kvjax.core.manager.invalidation import OriginPredicate, invalidate, origin_filter, stop_registering
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.watch.kv_events import KVCacheEvent, KVEventLog
from kvjax.core.watch.prefix_cache_stats import PrefixCacheStats


class PrefixCacheControl:
    """The part of `KVCacheManager` that is about no single request."""

    block_pools: tuple[BlockPool, ...]
    coordinator: KVCacheCoordinator
    request_table: RequestTable
    _event_log: KVEventLog
    _stats: PrefixCacheStats | None

    def evict_blocks(self, block_ids: npt.ArrayLike | Iterable[int], pool_id: int = 0) -> None:
        """Forgets the hashes of blocks, held or free; who holds them stays.

        Raises:
            ValueError: an id or the pool is out of range.
        """
        if not 0 <= pool_id < len(self.block_pools):
            raise ValueError(f"expected pool_id in [0, {len(self.block_pools)}), got {pool_id}")
        ids = sorted(block_ids) if isinstance(block_ids, set | frozenset) else block_ids
        self.block_pools[pool_id].evict_blocks(ids)  # type: ignore[arg-type]

    def invalidate(
        self,
        *,
        cache_salt: str | None = None,
        lora: LoRARequest | str | None = None,
        weight_version: int | str | None = None,
        predicate: OriginPredicate | None = None,
    ) -> int:
        """Forgets what was computed under a salt, an adapter (or all of a name) or a weight version: all that is given.

        Matching blocks are no hits any more; requests that hold them go on, but register no more blocks. Needs
        `track_origins=True`.

        Returns:
            How many blocks ceased to be hits.

        Raises:
            ValueError: no condition is given, or origins are not tracked.
        """
        matches = origin_filter(cache_salt, lora, weight_version, predicate)
        return invalidate(self.block_pools, self.request_table, matches)

    def stop_registering(self, predicate: OriginPredicate | None = None) -> int:
        """No block that requests running now fill from here on becomes a hit: other weights compute them, for example.

        Args:
            predicate: which requests, by their origin; None: all.

        Returns:
            How many requests that concerns.
        """
        return stop_registering(self.request_table, predicate)

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes, as new weights demand; False, and nothing changes, while any block is held."""
        if any(pool.num_free_blocks != pool.num_usable_blocks for pool in self.block_pools):
            return False
        for pool in self.block_pools:
            pool.reset_prefix_cache()
        self.coordinator.new_step_starts()
        if self.coordinator.sub_block_hits is not None:
            self.coordinator.sub_block_hits.clear()
        if self._stats is not None:
            self._stats.reset = True
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of all pools since the last call, oldest first."""
        return self._event_log.take()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Lookups since the last call; None without `log_stats`."""
        stats = self._stats
        if stats is not None:
            self._stats = PrefixCacheStats()
        return stats

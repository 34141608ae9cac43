"""The pools of a manager, all blocks free.

Flow:    KVCacheConfig, ManagerOptions -> [make_pools] -> BlockPools with one log of events
"""

from __future__ import annotations

from kvjax.core.kinds.manager_settings import ManagerSettings
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.cache_tier import CacheTier, TierLink
from kvjax.core.spec import KVCacheConfig
from kvjax.core.watch.kv_events import KVEventLog
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector


def make_pools(
    kv_cache_config: KVCacheConfig,
    settings: ManagerSettings,
    event_log: KVEventLog,
    metrics_collector: KVCacheMetricsCollector | None,
    tier: CacheTier | None,
) -> tuple[BlockPool, ...]:
    """One pool for each of the config's, which tells the log, the collector and the tier what happens."""
    groups, options = kv_cache_config.kv_cache_groups, settings.options
    return tuple(
        BlockPool(
            pool.num_blocks,
            options.enable_caching,
            settings.hash_block_size,
            group_ids=[group_id for group_id, group in enumerate(groups) if group.pool_id == pool_id],
            enable_kv_cache_events=options.enable_kv_cache_events,
            metrics_collector=metrics_collector,
            free_order=options.rules.free_order,
            eviction_policy=options.eviction_policy,
            event_log=event_log,
            track_origins=options.track_origins,
            zero_new_pages=options.zero_new_pages,
            tier_link=None if tier is None else TierLink(tier, pool_id, pool.num_blocks),
        )
        for pool_id, pool in enumerate(kv_cache_config.pools)
    )


__all__ = ["make_pools"]

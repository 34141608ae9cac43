"""The manager of an engine's cache.

Flow:    EngineConfig, KVCachePlan -> [make_manager] -> KVCacheManager of a HostLoop
"""

from __future__ import annotations

from kvjax.core import KVCacheManager, MissReasons
from kvjax.engine.step.config import EngineConfig
from kvjax.engine.step.model_runner import least_block_size
from kvjax.planning import KVCachePlan
from kvjax.tiers.connector import RankConnector


def make_manager(config: EngineConfig, plan: KVCachePlan, connector: RankConnector | None) -> KVCacheManager:
    """An empty cache, which the connector knows from here on."""
    manager = KVCacheManager(
        plan.config,
        config.max_model_len,
        least_block_size(plan),
        config.manager_options,
        enable_caching=config.enable_prefix_caching,
        same_step_hits=not config.sub_block_hits,
        sub_block_hits=config.sub_block_hits,
        miss_reasons=MissReasons() if config.miss_reasons else None,
        zero_new_pages=config.zero_new_pages,
        log_stats=True,
        max_num_reqs=config.max_num_seqs,
        max_in_flight_tokens=config.max_in_flight_tokens,
        tier=None if connector is None else connector.tier,
    )
    if connector is not None:
        connector.scheduler.bind_kv_cache_manager(manager)
    return manager


__all__ = ["make_manager"]

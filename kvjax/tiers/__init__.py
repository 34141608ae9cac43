"""Cached blocks beyond the pools: in host memory, on disk, and on a store that replicas share.

Flow:    KVCacheManager and engine -> [connector] -> host, disk, shared store -> pages

See docs/tiers.md. `kvjax.tiers.worker.tier_worker` loads jax, the rest does not.
"""

from kvjax.tiers.config import TierConfig
from kvjax.tiers.connector import (
    ConnectorOutput,
    KVConnector,
    LoadResults,
    RankConnector,
    SchedulerConnector,
    StepConnector,
    WeightsInUse,
    WorkerConnector,
)
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.stats import TierStats

__all__ = [
    "ConnectorOutput",
    "KVConnector",
    "LoadResults",
    "RankConnector",
    "SchedulerConnector",
    "SharedTierConfig",
    "StepConnector",
    "TierConfig",
    "TierStats",
    "WeightsInUse",
    "WorkerConnector",
]

"""Cached blocks beyond the pools: in host memory and on disk.

Flow:    KVCacheManager and engine -> [connector] -> host, disk -> pages

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
from kvjax.tiers.stats import TierStats

__all__ = [
    "ConnectorOutput",
    "KVConnector",
    "LoadResults",
    "RankConnector",
    "SchedulerConnector",
    "StepConnector",
    "TierConfig",
    "TierStats",
    "WeightsInUse",
    "WorkerConnector",
]

"""Prometheus metrics of a KV cache under vLLM's names. Needs `kvjax[metrics]` once metrics are made.

Flow:    KVCacheManager -> [kvjax.metrics] -> a Prometheus registry -> dashboards, routers' scorers
"""

from kvjax.metrics.engine_families import EngineFamilies
from kvjax.metrics.engine_metrics import EngineMetrics
from kvjax.metrics.families import MetricFamilies
from kvjax.metrics.manager_metrics import KVCacheMetrics
from kvjax.metrics.names import MetricNames

__all__ = ["EngineFamilies", "EngineMetrics", "KVCacheMetrics", "MetricFamilies", "MetricNames"]

"""The Prometheus metrics of one registry, each with a series per set of labels.

Flow:    MetricNames, label names -> [MetricFamilies] -> KVCacheMetrics of each engine
Source:  vLLM 0.33 v1/metrics/loggers.py (PrometheusStatLogger): kinds and buckets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvjax.extras import require_extra
from kvjax.metrics.names import MetricNames

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SECONDS = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
POOL_LABELS = ("pool",)
BLOCK_LABELS = ("pool", "state")
REASON_LABELS = ("reason",)
GROUP_LABELS = ("group",)
CLASS_LABELS = ("pool", "class")
WORTH_LABELS = (*CLASS_LABELS, "age")
CONFIG_LABELS = ("block_size", "num_gpu_blocks", "enable_prefix_caching")


class MetricFamilies:
    """All metrics, registered once. Engines of one process share them and differ in their labels.

    Nothing global is touched: without a registry given there is a new one, `registry`.
    """

    def __init__(
        self,
        label_names: Sequence[str] = (),
        *,
        names: MetricNames | None = None,
        registry: CollectorRegistry | None = None,
        buckets: Sequence[float] = SECONDS,
    ) -> None:
        """The metrics.

        Args:
            label_names: of every series, such as `("model_name", "engine")`, vLLM's.
            names: what the metrics are called; None: as in vLLM.
            registry: where they are registered; None: one of their own.
            buckets: upper bounds of the histograms in seconds, ascending.

        Raises:
            ValueError: a label is one of the metrics' own or comes twice, a name or label is none of Prometheus, or
                the registry has a metric of a name.
            MissingExtraError: prometheus_client is not installed.
        """
        own = {*BLOCK_LABELS, *REASON_LABELS, *GROUP_LABELS, *WORTH_LABELS, *CONFIG_LABELS}
        if taken := own.intersection(label_names):
            raise ValueError(f"expected labels other than the metrics' own, got {', '.join(sorted(taken))}")
        if len(set(label_names)) < len(label_names):
            raise ValueError(f"expected distinct label names, got {', '.join(label_names)}")
        client = require_extra("prometheus_client", "metrics", "exporting metrics")
        self.label_names = tuple(label_names)
        self.registry: CollectorRegistry = client.CollectorRegistry() if registry is None else registry
        self.names = names = MetricNames() if names is None else names

        def made(kind: Callable[..., Any], key: str, text: str, labels: Sequence[str] = ()) -> Any:
            return kind(names.name_of(key), text, (*self.label_names, *labels), registry=self.registry)

        gauge, counter = client.Gauge, client.Counter
        histogram = partial(client.Histogram, buckets=tuple(buckets))
        self.usage = made(gauge, "kv_cache_usage_perc", "Held share of the KV cache's blocks, 0 to 1.")
        self.blocks = made(gauge, "kv_cache_blocks", "Blocks of the KV cache by state.", BLOCK_LABELS)
        self.evicted = made(counter, "kv_cache_evicted_blocks", "Cached blocks that ceased to be hits.", POOL_LABELS)
        self.queries = made(counter, "prefix_cache_queries", "Tokens looked up of requests admitted first.")
        self.hits = made(counter, "prefix_cache_hits", "Tokens of these requests that were found.")
        self.missed = made(counter, "prefix_cache_missed_tokens", "Tokens not found, by reason.", REASON_LABELS)
        self.short = made(counter, "prefix_cache_short_tokens", "Less than the best group's hit.", GROUP_LABELS)
        self.evicted_ago = made(histogram, "prefix_cache_evicted_ago_seconds", "Eviction to the lookup that missed it.")
        self.uses = made(gauge, "kv_cache_learned_uses", "Hits that the policy counts by class, faded.", CLASS_LABELS)
        self.waited = made(gauge, "kv_cache_learned_waited_requests", "Requests waited for them, faded.", CLASS_LABELS)
        self.worth = made(gauge, "kv_cache_learned_worth", "Hits a request that keeping brings.", WORTH_LABELS)
        self.preemptions = made(counter, "num_preemptions", "Requests that lost their blocks to others.")
        self.config = made(gauge, "cache_config_info", "Settings of the KV cache, as labels.", CONFIG_LABELS)
        self.lifetime = made(histogram, "kv_block_lifetime_seconds", "Allocation to eviction, sampled blocks.")
        self.idle = made(histogram, "kv_block_idle_before_evict_seconds", "Last access to eviction, sampled blocks.")
        self.reuse_gap = made(histogram, "kv_block_reuse_gap_seconds", "Between accesses, sampled blocks.")

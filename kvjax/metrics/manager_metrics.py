"""What a KV cache does, as Prometheus series: read from its manager after each step.

Flow:    KVCacheManager, KVCacheMetricsCollector -> [KVCacheMetrics.observe] -> registry -> scrapes
Source:  vLLM 0.33 v1/metrics/loggers.py

    residency = KVCacheMetricsCollector()
    manager = KVCacheManager(config, max_model_len, block_size, log_stats=True, metrics_collector=residency)
    metrics = KVCacheMetrics(manager, {"model_name": "llama", "engine": "0"}, residency=residency)
    prometheus_client.start_http_server(8000, registry=metrics.registry)
    while serving:
        ...  # allocate_slots, plan_step, free
        metrics.observe(num_preemptions)

The scheduler's thread observes, any other scrapes: a scrape reads numbers of one moment, never the manager itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvjax.core.eviction.learned_table import LearnedClass
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.misses.lookup_report import MissReason
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.watch.prefix_cache_stats import PrefixCacheStats
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector
from kvjax.metrics.families import MetricFamilies

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class KVCacheMetrics:
    """The series of one manager, or of those of all data ranks together.

    `observe` belongs to the managers' thread; about 20 us each, whatever the pools' sizes.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        labels: Mapping[str, str] | None = None,
        *,
        families: MetricFamilies | None = None,
        residency: KVCacheMetricsCollector | None = None,
        other_ranks: Sequence[KVCacheManager] = (),
    ) -> None:
        """Series that start at what the manager shows now.

        Args:
            manager: made with `log_stats=True`, otherwise queries and hits stay 0; made with `miss_reasons`, their
                series are here too.
            labels: one value for each of the families' label names.
            families: the metrics of several engines; None: metrics of its own, in a registry of its own.
            residency: the manager's `metrics_collector`; its events are drained. None: no histograms.
            other_ranks: managers of further data ranks: counts are sums, the usage is that of the fullest.

        Raises:
            ValueError: labels other than the families', or as `MetricFamilies`.
            MissingExtraError: prometheus_client is not installed.
        """
        labels = {} if labels is None else labels
        families = MetricFamilies(tuple(labels)) if families is None else families
        if set(labels) != set(families.label_names):
            raise ValueError(f"expected labels {list(families.label_names)}, got {list(labels)}")
        self.registry: CollectorRegistry = families.registry
        self._managers = (manager, *other_ranks)
        self._residency = residency

        def series(family: Any, **own_labels: str) -> Any:
            return family.labels(**labels, **own_labels) if labels or own_labels else family

        self._usage = series(families.usage)
        self._queries = series(families.queries)
        self._hits = series(families.hits)
        self._preemptions = series(families.preemptions)
        self._pools = [_PoolSeries(series, families, pool_id) for pool_id in range(len(manager.block_pools))]
        self._learned = [
            _LearnedSeries(series, families, pool_id, pool.eviction_policy.learned())
            for pool_id, pool in enumerate(manager.block_pools)
        ]
        if residency is not None:
            self._lifetime = series(families.lifetime)
            self._idle = series(families.idle)
            self._reuse_gap = series(families.reuse_gap)
        self._misses = [
            _MissSeries(series, families, one.miss_reasons, one.num_kv_cache_groups)
            for one in self._managers
            if one.miss_reasons is not None
        ]
        series(families.config, **_config_labels(self._managers)).set(1)
        self.observe()

    def observe(self, num_preemptions: int = 0, prefix_cache_stats: PrefixCacheStats | None = None) -> None:
        """Brings all series up to date.

        Args:
            num_preemptions: since the last call.
            prefix_cache_stats: admissions since the last call, if the caller has taken them from the manager already;
                None: they are taken here.

        Raises:
            ValueError: a negative number of preemptions. Nothing has changed.
        """
        if num_preemptions < 0:
            raise ValueError(f"expected num_preemptions >= 0, got {num_preemptions}")
        self._preemptions.inc(num_preemptions)
        self._usage.set(max(manager.usage for manager in self._managers))
        for pool_id, series in enumerate(self._pools):
            series.observe([manager.block_pools[pool_id] for manager in self._managers])
        for learned in self._learned:
            learned.observe([manager.block_pools[learned.pool_id] for manager in self._managers])
        self._observe_lookups(prefix_cache_stats)
        self._observe_residency()
        for misses in self._misses:
            misses.observe()

    def _observe_lookups(self, stats: PrefixCacheStats | None) -> None:
        found = [one.make_prefix_cache_stats() for one in self._managers] if stats is None else [stats]
        for one in found:
            if one is not None:
                self._queries.inc(one.queries)
                self._hits.inc(one.hits)

    def _observe_residency(self) -> None:
        if self._residency is None:
            return
        for event in self._residency.drain_events():
            self._lifetime.observe(event.lifetime_seconds)
            self._idle.observe(event.idle_seconds)
            for gap_seconds in event.reuse_gaps_seconds:
                self._reuse_gap.observe(gap_seconds)


class _PoolSeries:
    """The series of one pool."""

    def __init__(self, series: Any, families: MetricFamilies, pool_id: int) -> None:
        pool = str(pool_id)
        self._held = series(families.blocks, pool=pool, state="held")
        self._cached = series(families.blocks, pool=pool, state="cached")
        self._free = series(families.blocks, pool=pool, state="free")
        self._evicted = series(families.evicted, pool=pool)
        self._num_evicted = 0  # at the last observation

    def observe(self, pools: Sequence[BlockPool]) -> None:
        """Counts the blocks of each rank's pool: held, free but still a hit, free and empty; the null block is none."""
        num_cached = sum(pool.num_cached_free_blocks for pool in pools)
        num_free = sum(pool.num_free_blocks for pool in pools)
        num_evicted = sum(pool.num_evicted_blocks for pool in pools)
        self._held.set(sum(pool.num_blocks - 1 for pool in pools) - num_free)
        self._cached.set(num_cached)
        self._free.set(num_free - num_cached)
        self._evicted.inc(num_evicted - self._num_evicted)
        self._num_evicted = num_evicted


class _LearnedSeries:
    """What the policy of one pool found out, if it learns."""

    def __init__(self, series: Any, families: MetricFamilies, pool_id: int, classes: tuple[LearnedClass, ...]) -> None:
        self.pool_id = pool_id
        names = [{"pool": str(pool_id), "class": each.name} for each in classes]
        ages = [age for age, _ in classes[0].worth_by_age] if classes else []
        self._uses = [series(families.uses, **name) for name in names]
        self._waited = [series(families.waited, **name) for name in names]
        self._worth = [[series(families.worth, **name, age=str(age)) for age in ages] for name in names]
        self._seen: list[tuple[LearnedClass, ...]] = []

    def observe(self, pools: Sequence[BlockPool]) -> None:
        """Over the ranks, uses and waiting are sums, the worth is the mean."""
        found = [pool.eviction_policy.learned() for pool in pools]
        if found == self._seen:
            return
        self._seen = found
        for i, of_ranks in enumerate(zip(*found, strict=True)):
            self._uses[i].set(sum(each.uses for each in of_ranks))
            self._waited[i].set(sum(each.waited_requests for each in of_ranks))
            for j, series in enumerate(self._worth[i]):
                series.set(sum(each.worth_by_age[j][1] for each in of_ranks) / len(of_ranks))


class _MissSeries:
    """Why admissions missed. Those since the last observation count in full, the histogram knows the reports kept."""

    def __init__(self, series: Any, families: MetricFamilies, reasons: MissReasons, num_groups: int) -> None:
        self._reasons = reasons
        self._missed = {reason: series(families.missed, reason=reason.value) for reason in MissReason}
        self._short = [series(families.short, group=str(group_id)) for group_id in range(num_groups)]
        self._evicted_ago = series(families.evicted_ago)
        self._seen_missed: Counter[MissReason] = Counter()  # at the last observation, as all that follow
        self._seen_short: Counter[int] = Counter()
        self._num_seen = 0

    def observe(self) -> None:
        """Adds what is new."""
        reasons = self._reasons
        for reason, count in (reasons.num_missed_tokens - self._seen_missed).items():
            self._missed[reason].inc(count)
        for group_id, count in (reasons.num_tokens_short - self._seen_short).items():
            self._short[group_id].inc(count)
        for report in islice(reversed(reasons.reports), reasons.num_admitted - self._num_seen):
            if report.num_evicted_tokens and report.evicted is not None:
                self._evicted_ago.observe(report.evicted.seconds_since)
        self._seen_missed, self._seen_short = reasons.num_missed_tokens.copy(), reasons.num_tokens_short.copy()
        self._num_seen = reasons.num_admitted


def _config_labels(managers: Sequence[KVCacheManager]) -> dict[str, str]:
    """Settings of the first group, which routers take for those of the engine."""
    manager = managers[0]
    group = manager.kv_cache_config.kv_cache_groups[0]
    return {
        "block_size": str(group.kv_cache_spec.block_size),
        "num_gpu_blocks": str(sum(one.block_pools[group.pool_id].num_blocks for one in managers)),
        "enable_prefix_caching": str(manager.enable_caching),
    }

"""Scraped numbers equal those of the manager, for one engine and for several in a registry."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvjax.core import BlockRemoved, KVCacheManager, KVCacheMetricsCollector, MissReason, MissReasons
from kvjax.core.eviction import LearnedPolicy
from kvjax.errors import MissingExtraError
from kvjax.metrics import KVCacheMetrics, MetricFamilies
from tests.events.workload import FULL, TWO_POOLS, Workload, make_manager

LABELS = {"model_name": "llama", "engine": "0"}


def scrape(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Series by name and labels, from the text that a scrape gets."""
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return scrape(registry)[f"vllm:{name}", tuple(sorted(labels.items()))]


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.mark.parametrize("groups", [FULL, TWO_POOLS], ids=["full", "two_pools"])
@pytest.mark.parametrize("seed", range(2))
def test_the_numbers_follow_the_manager(groups: Any, seed: int) -> None:
    clock = Clock()
    residency = KVCacheMetricsCollector(1.0, clock=clock)
    work = Workload(make_manager(groups, 30, metrics_collector=residency), seed)
    manager = work.manager
    metrics = KVCacheMetrics(manager, LABELS, residency=residency)
    told_removed = num_preemptions = num_queries = num_hits = 0
    for step in range(120):
        clock.now_ns = step * 10**9
        work.step()
        stats = manager.make_prefix_cache_stats()
        num_queries += stats.queries
        num_hits += stats.hits
        metrics.observe(work.num_preemptions - num_preemptions, stats)
        num_preemptions = work.num_preemptions
        told_removed += sum(isinstance(event, BlockRemoved) for event in manager.take_events())
    of_engine = tuple(sorted(LABELS.items()))
    seen = {name: value for (name, labels), value in scrape(metrics.registry).items() if labels == of_engine}
    assert seen["vllm:kv_cache_usage_perc"] == manager.usage
    assert seen["vllm:prefix_cache_queries_total"] == num_queries
    assert seen["vllm:prefix_cache_hits_total"] == num_hits > 0
    assert seen["vllm:num_preemptions_total"] == work.num_preemptions > 0
    evicted = 0.0
    for pool_id, pool in enumerate(manager.block_pools):
        blocks = {
            state: value(metrics.registry, "kv_cache_blocks", pool=str(pool_id), state=state, **LABELS)
            for state in ("held", "cached", "free")
        }
        assert sum(blocks.values()) == pool.num_blocks - 1
        assert blocks["held"] == (pool.ref_count > 0).sum()
        assert blocks["cached"] == (pool.is_hashed & (pool.ref_count == 0)).sum()
        evicted += value(metrics.registry, "kv_cache_evicted_blocks_total", pool=str(pool_id), **LABELS)
    assert evicted == told_removed > 0
    assert seen["vllm:kv_block_lifetime_seconds_count"] == seen["vllm:kv_block_idle_before_evict_seconds_count"] > 0
    assert seen["vllm:kv_block_lifetime_seconds_sum"] >= seen["vllm:kv_block_idle_before_evict_seconds_sum"]


def test_residencies_fall_into_their_buckets() -> None:
    clock = Clock()
    residency = KVCacheMetricsCollector(1.0, clock=clock)
    manager = make_manager(FULL, 4, metrics_collector=residency)
    metrics = KVCacheMetrics(manager, residency=residency)
    pool = manager.block_pool
    ids = pool.get_new_blocks(1)
    for second in (1, 3):
        clock.now_ns = second * 10**9
        pool.touch(ids)
    clock.now_ns = 33 * 10**9
    pool.free_blocks([*ids] * 3)
    pool.free_blocks(pool.get_new_blocks(3))
    metrics.observe()
    series = scrape(metrics.registry)

    def buckets(name: str) -> dict[str, float]:
        return {labels[0][1]: count for (of, labels), count in series.items() if of == f"vllm:{name}_bucket"}

    lifetime, idle, gap = (
        buckets(f"kv_block_{name}_seconds") for name in ("lifetime", "idle_before_evict", "reuse_gap")
    )
    assert (lifetime["30.0"], lifetime["60.0"], lifetime["+Inf"]) == (0, 1, 1)
    assert (idle["20.0"], idle["30.0"], idle["+Inf"]) == (0, 1, 1)
    assert (gap["1.0"], gap["2.0"], gap["+Inf"]) == (0, 1, 1)
    assert len(lifetime) == 22


def test_stats_are_taken_from_the_manager_if_not_given() -> None:
    manager = make_manager(FULL, 20)
    metrics = KVCacheMetrics(manager)
    work = Workload(manager, 0)
    request = work.request(list(range(9)))
    for _ in range(3):  # it waits
        manager.get_computed_blocks(request)
        metrics.observe()
    assert value(metrics.registry, "prefix_cache_queries_total") == 0
    assert manager.allocate_slots(request, 9) is not None
    metrics.observe()
    assert value(metrics.registry, "prefix_cache_queries_total") == 9
    assert manager.make_prefix_cache_stats().requests == 0


def test_a_manager_without_statistics_leaves_the_counters_at_0() -> None:
    manager = make_manager(FULL, 20, log_stats=False)
    metrics = KVCacheMetrics(manager)
    manager.get_computed_blocks(Workload(manager, 0).request(list(range(9))))
    metrics.observe()
    assert value(metrics.registry, "prefix_cache_queries_total") == 0


@pytest.mark.parametrize("groups", [FULL, TWO_POOLS], ids=["full", "two_pools"])
def test_missed_tokens_follow_the_reasons(groups: Any) -> None:
    clock = Clock()
    reasons = MissReasons(clock=clock)
    work = Workload(make_manager(groups, 30, miss_reasons=reasons), 1)
    metrics = KVCacheMetrics(work.manager, LABELS)
    ago: list[float] = []
    num_seen = 0
    for step in range(120):
        clock.now_ns = step * 10**9
        work.step()
        new = list(reasons.reports)[num_seen:]
        num_seen += len(new)
        ago += [r.evicted.seconds_since for r in new if r.evicted and r.num_evicted_tokens]
        metrics.observe()
    missed = {
        reason: value(metrics.registry, "prefix_cache_missed_tokens_total", reason=reason, **LABELS)
        for reason in MissReason
    }
    assert {reason: count for reason, count in missed.items() if count} == reasons.num_missed_tokens
    found = value(metrics.registry, "prefix_cache_hits_total", **LABELS)
    assert found + sum(missed.values()) == value(metrics.registry, "prefix_cache_queries_total", **LABELS)
    for group_id in range(work.manager.num_kv_cache_groups):
        short = value(metrics.registry, "prefix_cache_short_tokens_total", group=str(group_id), **LABELS)
        assert short == reasons.num_tokens_short[group_id]
    assert value(metrics.registry, "prefix_cache_evicted_ago_seconds_count", **LABELS) == len(ago) > 0
    assert value(metrics.registry, "prefix_cache_evicted_ago_seconds_sum", **LABELS) == sum(ago)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_policy_learned_is_told_by_class_and_age(num_ranks: int) -> None:
    """Of ranks the counts are summed, and the worth is their mean."""
    policy = partial(LearnedPolicy, learn_every=5)
    ranks = [Workload(make_manager(FULL, 40, eviction_policy=policy), seed) for seed in range(num_ranks)]
    first, *others = [rank.manager for rank in ranks]
    metrics = KVCacheMetrics(first, LABELS, other_ranks=others)
    for _ in range(150):
        for rank in ranks:
            rank.step()
        metrics.observe()
    learned = [rank.manager.block_pool.eviction_policy.learned() for rank in ranks]
    for of_ranks in zip(*learned, strict=True):
        labels = {"pool": "0", "class": of_ranks[0].name, **LABELS}
        assert value(metrics.registry, "kv_cache_learned_uses", **labels) == sum(each.uses for each in of_ranks)
        waited = value(metrics.registry, "kv_cache_learned_waited_requests", **labels)
        assert waited == sum(each.waited_requests for each in of_ranks)
        for (age, _), *_ in zip(*(each.worth_by_age for each in of_ranks), strict=True):
            worth = [dict(each.worth_by_age)[age] for each in of_ranks]
            told = value(metrics.registry, "kv_cache_learned_worth", age=str(age), **labels)
            assert told == pytest.approx(sum(worth) / num_ranks)
    assert all(of_rank[0].uses > 0 for of_rank in learned)


def test_a_policy_that_learns_nothing_has_no_series_of_it() -> None:
    metrics = KVCacheMetrics(make_manager(TWO_POOLS, 20, eviction_policy="learned"))
    assert not any("learned" in name for name, _ in scrape(metrics.registry))


def test_settings_are_labels() -> None:
    metrics = KVCacheMetrics(make_manager(FULL, 20), LABELS)
    labels = {"block_size": "2", "num_gpu_blocks": "20", "enable_prefix_caching": "True", **LABELS}
    assert value(metrics.registry, "cache_config_info", **labels) == 1


def test_engines_share_families_and_differ_in_labels() -> None:
    families = MetricFamilies(("model_name", "engine"))
    managers = [make_manager(FULL, 20) for _ in range(2)]
    metrics = [
        KVCacheMetrics(manager, {"model_name": "llama", "engine": str(i)}, families=families)
        for i, manager in enumerate(managers)
    ]
    managers[1].block_pool.get_new_blocks(19)
    for of_engine in metrics:
        of_engine.observe(2)
    assert metrics[0].registry is metrics[1].registry is families.registry
    for engine, usage in (("0", 0.0), ("1", 1.0)):
        labels = {"model_name": "llama", "engine": engine}
        assert value(families.registry, "kv_cache_usage_perc", **labels) == usage
        assert value(families.registry, "num_preemptions_total", **labels) == 2
    managers[1].block_pool.free_blocks(range(1, 20))


def test_nothing_global_is_registered() -> None:
    before = list(prometheus_client.REGISTRY.collect())
    one, two = (KVCacheMetrics(make_manager(FULL, 20)) for _ in range(2))
    assert one.registry is not two.registry
    assert {family.name for family in prometheus_client.REGISTRY.collect()} == {family.name for family in before}


def test_a_registry_of_the_callers() -> None:
    registry = CollectorRegistry()
    families = MetricFamilies(registry=registry)
    assert families.registry is registry
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        MetricFamilies(registry=registry)


def test_labels_other_than_the_families_are_refused() -> None:
    families = MetricFamilies(("model_name", "engine"))
    with pytest.raises(ValueError, match=r"expected labels \['model_name', 'engine'\], got \['model'\]"):
        KVCacheMetrics(make_manager(FULL, 20), {"model": "llama"}, families=families)


@pytest.mark.parametrize(
    ("label_names", "message"),
    [
        (("pool", "engine"), "expected labels other than the metrics' own, got pool"),
        (("engine", "engine"), "expected distinct label names, got engine, engine"),
    ],
)
def test_label_names_that_clash_are_refused(label_names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetricFamilies(label_names)


def test_a_negative_count_changes_nothing() -> None:
    manager = make_manager(FULL, 20)
    metrics = KVCacheMetrics(manager)
    before = scrape(metrics.registry)
    ids = manager.block_pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="expected num_preemptions >= 0, got -1"):
        metrics.observe(-1)
    assert scrape(metrics.registry) == before
    manager.block_pool.free_blocks(ids)


def test_importing_needs_no_prometheus_and_making_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import kvjax.metrics, sys; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    message = r"exporting metrics needs prometheus_client.*pip install 'kvjax\[metrics\]'"
    with pytest.raises(MissingExtraError, match=message):
        MetricFamilies()


def test_the_manager_is_not_read_by_a_scrape() -> None:
    """Between observations a scrape shows the last one, whatever the manager does."""
    manager: KVCacheManager = make_manager(FULL, 20)
    metrics = KVCacheMetrics(manager)
    ids = manager.block_pool.get_new_blocks(19)
    assert value(metrics.registry, "kv_cache_usage_perc") == 0.0
    metrics.observe()
    assert value(metrics.registry, "kv_cache_usage_perc") == 1.0
    manager.block_pool.free_blocks(ids)


def test_an_observation_looks_at_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step must not cost more for a larger pool: blocks are read from counters."""
    manager = make_manager(FULL, 20)
    metrics = KVCacheMetrics(manager)
    with monkeypatch.context() as patch:
        patch.setattr(manager.block_pool, "ref_count", None)
        patch.setattr(manager.block_pool, "is_hashed", None)
        metrics.observe()
    assert value(metrics.registry, "kv_cache_blocks", pool="0", state="free") == 19

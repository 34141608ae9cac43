"""What the metrics are called."""

from __future__ import annotations

import pytest

from kvjax.metrics import MetricFamilies, MetricNames

VLLM_NAMES = {
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:kv_cache_blocks": "gauge",
    "vllm:kv_cache_evicted_blocks": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_missed_tokens": "counter",
    "vllm:prefix_cache_short_tokens": "counter",
    "vllm:prefix_cache_evicted_ago_seconds": "histogram",
    "vllm:kv_cache_learned_uses": "gauge",
    "vllm:kv_cache_learned_waited_requests": "gauge",
    "vllm:kv_cache_learned_worth": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:kv_block_lifetime_seconds": "histogram",
    "vllm:kv_block_idle_before_evict_seconds": "histogram",
    "vllm:kv_block_reuse_gap_seconds": "histogram",
    "vllm:cache_config_info": "gauge",
}


def kinds_of(families: MetricFamilies) -> dict[str, str]:
    return {family.name: family.type for family in families.registry.collect()}


def test_names_and_kinds_are_those_of_vllm() -> None:
    assert kinds_of(MetricFamilies()) == VLLM_NAMES


def test_a_prefix_and_single_names_can_be_chosen() -> None:
    names = MetricNames(
        "kvjax_", {"kv_cache_usage_perc": "cache_fullness", "prefix_cache_hits": "vllm:prefix_cache_hits"}
    )
    renamed = {name.replace("vllm:", "kvjax_"): kind for name, kind in VLLM_NAMES.items()}
    renamed["cache_fullness"] = renamed.pop("kvjax_kv_cache_usage_perc")
    renamed["vllm:prefix_cache_hits"] = renamed.pop("kvjax_prefix_cache_hits")
    assert kinds_of(MetricFamilies(names=names)) == renamed


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected names of kv_cache_usage_perc, .*, got hit_rate, usage"):
        MetricNames(names={"usage": "a", "hit_rate": "b"})


def test_one_name_for_two_metrics_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a name of its own for each metric, got x twice"):
        MetricNames(names={"prefix_cache_hits": "x", "prefix_cache_queries": "x"})

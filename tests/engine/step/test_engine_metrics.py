"""Scraped numbers of an engine equal those of its steps and results."""

from __future__ import annotations

import pytest

from kvjax.engine import LLMEngine, SamplingParams
from kvjax.metrics import EngineFamilies, EngineMetrics, MetricFamilies, MetricNames
from tests.engine.engines import FEW_BLOCKS, golden_prompts, make_engine
from tests.engine.failures import plant
from tests.metrics.test_manager_metrics import scrape, value

NAME = "llama"
KINDS = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:kv_tier_disk_outage": "gauge",
    "vllm:kv_tier_shared_outage": "gauge",
}


def measured() -> tuple[LLMEngine, EngineMetrics]:
    engine = make_engine(NAME, num_blocks=FEW_BLOCKS[NAME], watermark=0.0)
    metrics = EngineMetrics(engine)
    engine.add_observer(metrics)
    return engine, metrics


def test_names_and_kinds_are_those_of_vllm() -> None:
    cache = MetricFamilies()
    before = {family.name for family in cache.registry.collect()}
    EngineFamilies(cache)
    assert {family.name: family.type for family in cache.registry.collect() if family.name not in before} == KINDS
    renamed = EngineFamilies(MetricFamilies(names=MetricNames("kvjax_", {"prompt_tokens": "prompts"})))
    names = {family.name for family in renamed.cache.registry.collect()}
    assert {"prompts", "kvjax_generation_tokens"} <= names


def test_the_numbers_follow_the_steps_and_the_results() -> None:
    engine, metrics = measured()
    prompts = golden_prompts(NAME)
    results = engine.generate(prompts, [SamplingParams(max_tokens=24 + i, seed=i) for i in range(len(prompts))])
    engine.abort(engine.add_request([1, 2, 3]))
    registry = metrics.registry

    def of(name: str, **labels: str) -> float:
        return value(registry, name, **labels)

    num_tokens = sum(result.output_token_ids.size for result in results)
    assert of("generation_tokens_total") == of("request_generation_tokens_sum") == num_tokens
    assert of("prompt_tokens_total") == of("request_prompt_tokens_sum") == sum(map(len, prompts)) + 3
    assert of("request_success_total", finished_reason="length") == len(results)
    assert of("request_success_total", finished_reason="abort") == 1
    stats = engine.step_stats
    assert of("iteration_tokens_total_count") == len(stats)
    assert of("iteration_tokens_total_sum") == sum(one.num_new_tokens for one in stats)
    assert of("num_preemptions_total") == sum(one.num_preemptions for one in stats) > 0
    assert of("num_requests_running") == of("num_requests_waiting") == 0
    assert of("prefix_cache_queries_total") >= sum(map(len, prompts))
    own = [result.stats for result in results]
    first = [one.time_to_first_token_s or 0.0 for one in own]
    assert of("time_to_first_token_seconds_sum") == pytest.approx(sum(first))
    assert of("time_to_first_token_seconds_count") == len(results)
    assert of("request_time_per_output_token_seconds_sum") == pytest.approx(
        sum(1 / (one.output_tokens_per_s or 1.0) for one in own)
    )
    assert of("e2e_request_latency_seconds_count") == len(results) + 1


def test_series_go_on_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, metrics = measured()
    engine.generate(golden_prompts(NAME), SamplingParams(max_tokens=8))
    before = scrape(metrics.registry)
    with monkeypatch.context() as patch:
        plant(patch, "kvjax.engine.step.model_runner.ModelRunner.read", {0: RuntimeError}, "after")
        with pytest.raises(RuntimeError):
            engine.generate(golden_prompts(NAME), SamplingParams(max_tokens=8))
    engine.generate(golden_prompts(NAME), SamplingParams(max_tokens=8))
    after = scrape(metrics.registry)
    falling = ("num_requests", "kv_cache_blocks", "usage")
    assert all(after[key] >= before[key] for key in before if not any(name in key[0] for name in falling))
    assert value(metrics.registry, "request_success_total", finished_reason="length") == 2 * len(golden_prompts(NAME))


def test_engines_share_families_and_differ_in_labels() -> None:
    families = EngineFamilies(MetricFamilies(("engine",)))
    for name in "01":
        engine = make_engine(NAME)
        engine.add_observer(EngineMetrics(engine, {"engine": name}, families=families))
        engine.generate([[1, 2]], SamplingParams(max_tokens=3 + int(name)))
    registry = families.cache.registry
    assert [value(registry, "generation_tokens_total", engine=name) for name in "01"] == [3, 4]


def test_labels_that_clash_are_refused() -> None:
    with pytest.raises(ValueError, match="labels other than the metrics' own, got finished_reason"):
        EngineFamilies(MetricFamilies(("finished_reason",)))
    with pytest.raises(ValueError, match=r"expected labels \['engine'\], got \[\]"):
        EngineMetrics(make_engine(NAME), {}, families=EngineFamilies(MetricFamilies(("engine",))))

"""What an engine does, as Prometheus series beside those of its cache: told of each step by the engine.

Flow:    LLMEngine steps -> [EngineMetrics] -> registry -> scrapes
Source:  vLLM 0.33 v1/metrics/loggers.py: names, kinds and buckets

    metrics = EngineMetrics(engine, {"model_name": "llama", "engine": "0"})
    engine.add_observer(metrics)
    prometheus_client.start_http_server(8000, registry=metrics.registry)

The engine's thread tells, any other scrapes. Times of a request are observed when it ends. After an exception the
engine has another manager; its series go on where those of the one before stood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.metrics.engine_families import EngineFamilies
from kvjax.metrics.families import MetricFamilies
from kvjax.metrics.manager_metrics import KVCacheMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MeasuredTiers(Protocol):
    """What is read of `TierStats`."""

    disk_problem: str  # empty: the disk keeps units
    shared_problem: str  # empty: the shared store is in use


class MeasuredEngine(Protocol):
    """What is read of an `LLMEngine`."""

    @property
    def managers(self) -> tuple[KVCacheManager, ...]:
        """Its cache, by data rank; others after an exception."""

    @property
    def tier_stats(self) -> MeasuredTiers | None:
        """What its tiers have done; None: there are none."""


class EngineMetrics:
    """The series of one engine and of its cache. Belongs to the engine's thread; some 40 us a step."""

    def __init__(
        self,
        engine: MeasuredEngine,
        labels: Mapping[str, str] | None = None,
        *,
        families: EngineFamilies | None = None,
    ) -> None:
        """Series at 0.

        Args:
            engine: tell it of this object by `add_observer`.
            labels: one value for each of the families' label names.
            families: the metrics of several engines; None: metrics of its own, in a registry of its own.

        Raises:
            ValueError: labels other than the families', or as `MetricFamilies`.
            MissingExtraError: prometheus_client is not installed.
        """
        labels = {} if labels is None else labels
        families = EngineFamilies(MetricFamilies(tuple(labels))) if families is None else families
        self._engine = engine
        self._labels = labels
        self._families = families
        self._watch_cache()
        self.registry: CollectorRegistry = families.cache.registry

        def series(family: Any) -> Any:
            return family.labels(**labels) if labels else family

        self._running = series(families.running)
        self._waiting = series(families.waiting)
        self._prompt_tokens = series(families.prompt_tokens)
        self._generation_tokens = series(families.generation_tokens)
        self._step_tokens = series(families.step_tokens)
        self._draft_tokens = series(families.draft_tokens)
        self._accepted_tokens = series(families.accepted_tokens)
        self._first_token = series(families.first_token)
        self._per_token = series(families.per_token)
        self._latency = series(families.latency)
        self._request_prompt = series(families.request_prompt)
        self._request_generation = series(families.request_generation)
        self._disk_outage = series(families.disk_outage)
        self._shared_outage = series(families.shared_outage)

    def step_ended(self, stats: Any, outputs: Any) -> None:  # StepStats, StepOutputs
        """Counts a step, and the requests that ended in it."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._generation_tokens.inc(len(outputs))
        self._step_tokens.observe(stats.num_new_tokens)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted_tokens.inc(stats.num_accepted_tokens)
        for result in outputs.results.values():
            self._count(result)
        if self._engine.managers[0] is not self._manager:
            self._watch_cache()
        self._cache.observe(stats.num_preemptions)
        tiers = self._engine.tier_stats
        self._disk_outage.set(tiers is not None and bool(tiers.disk_problem))
        self._shared_outage.set(tiers is not None and bool(tiers.shared_problem))

    def request_aborted(self, result: Any) -> None:  # GenerationResult
        """Counts a request that was aborted."""
        self._count(result)

    def _watch_cache(self) -> None:
        self._manager, *others = self._engine.managers
        self._cache = KVCacheMetrics(self._manager, self._labels, families=self._families.cache, other_ranks=others)

    def _count(self, result: Any) -> None:
        stats, reason = result.stats, result.finish_reason.value
        self._families.ended.labels(**self._labels, finished_reason=reason).inc()
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._request_prompt.observe(stats.num_prompt_tokens)
        self._request_generation.observe(stats.num_output_tokens)
        self._latency.observe(stats.finish_time_s - stats.arrival_time_s)
        if stats.time_to_first_token_s is not None:
            self._first_token.observe(stats.time_to_first_token_s)
        if stats.output_tokens_per_s:
            self._per_token.observe(1 / stats.output_tokens_per_s)


__all__ = ["EngineMetrics"]

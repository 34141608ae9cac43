"""The Prometheus metrics of engines, in the registry of those of their caches.

Flow:    MetricFamilies -> [EngineFamilies] -> EngineMetrics of each engine
Source:  vLLM 0.33 v1/metrics/loggers.py (PrometheusStatLogger): kinds and buckets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvjax.extras import require_extra
from kvjax.metrics.families import MetricFamilies

ENDED_LABELS = ("finished_reason",)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class EngineFamilies:
    """All metrics of engines, registered once. Engines of one process share them and differ in their labels."""

    def __init__(self, cache: MetricFamilies) -> None:
        """The metrics, with the names, labels and registry of `cache`.

        Raises:
            ValueError: a label is `finished_reason`, or the registry has a metric of a name.
            MissingExtraError: prometheus_client is not installed.
        """
        if taken := set(ENDED_LABELS).intersection(cache.label_names):
            raise ValueError(f"expected labels other than the metrics' own, got {', '.join(taken)}")
        client = require_extra("prometheus_client", "metrics", "exporting metrics")
        self.cache = cache

        def made(kind: Callable[..., Any], key: str, text: str, labels: Sequence[str] = (), **more: Any) -> Any:
            name = cache.names.name_of(key)
            return kind(name, text, (*cache.label_names, *labels), registry=cache.registry, **more)

        def seconds(key: str, text: str, buckets: Sequence[float]) -> Any:
            return made(client.Histogram, key, text, buckets=buckets)

        gauge, counter, histogram = client.Gauge, client.Counter, client.Histogram
        self.running = made(gauge, "num_requests_running", "Requests that run.")
        self.waiting = made(gauge, "num_requests_waiting", "Requests that wait.")
        self.prompt_tokens = made(counter, "prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = made(counter, "generation_tokens", "Tokens generated.")
        self.step_tokens = made(histogram, "iteration_tokens_total", "Tokens of a step.", buckets=STEP_TOKENS)
        self.ended = made(counter, "request_success", "Requests that ended, by reason.", ENDED_LABELS)
        self.draft_tokens = made(counter, "spec_decode_num_draft_tokens", "Drafted tokens verified.")
        self.accepted_tokens = made(counter, "spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self.first_token = seconds("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS)
        self.per_token = seconds(
            "request_time_per_output_token_seconds", "Mean of a request after its first token.", PER_TOKEN_SECONDS
        )
        self.latency = seconds("e2e_request_latency_seconds", "Arrival to end.", LATENCY_SECONDS)
        tokens = {"buckets": REQUEST_TOKENS}
        self.request_prompt = made(histogram, "request_prompt_tokens", "Prompt tokens of a request.", **tokens)
        self.request_generation = made(histogram, "request_generation_tokens", "Output tokens of a request.", **tokens)
        self.disk_outage = made(gauge, "kv_tier_disk_outage", "1 while the disk tier keeps nothing new.")
        self.shared_outage = made(gauge, "kv_tier_shared_outage", "1 while the shared tier is left alone.")


__all__ = ["EngineFamilies"]

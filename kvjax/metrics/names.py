"""The metrics there are, and what each is called: vLLM's names unless told otherwise.

Flow:    a server's options -> [MetricNames] -> MetricFamilies
Source:  vLLM 0.33 v1/metrics/loggers.py; those that vLLM lacks are marked (own)

    key                               kind       labels beside the caller's       counts
    kv_cache_usage_perc               gauge                                       held share of the fullest pool, 0 to 1
    kv_cache_blocks              own  gauge      pool, state (held, cached, free) blocks; the three sum to the pool
    kv_cache_evicted_blocks      own  counter    pool                             cached blocks that ceased to be hits
    prefix_cache_queries              counter                                     tokens of requests, as first admitted
    prefix_cache_hits                 counter                                     those of them found
    prefix_cache_missed_tokens   own  counter    reason                           those not found, see MissReason
    prefix_cache_short_tokens    own  counter    group                            tokens less than the best group's hit
    prefix_cache_evicted_ago_seconds own histogram                                eviction to the lookup that missed it
    kv_cache_learned_uses        own  gauge      pool, class                      hits that the policy counts, faded
    kv_cache_learned_waited_requests own gauge   pool, class                      requests waited for them, faded
    kv_cache_learned_worth       own  gauge      pool, class, age (requests)      hits a request that keeping brings
    num_preemptions                   counter                                     as told by the caller
    kv_block_lifetime_seconds         histogram                                   allocation to eviction, sampled
    kv_block_idle_before_evict_seconds histogram                                  last access to eviction, sampled
    kv_block_reuse_gap_seconds        histogram                                   between accesses, sampled
    cache_config_info                 gauge      block_size, num_gpu_blocks, enable_prefix_caching      1

and of an engine (EngineMetrics):

    num_requests_running              gauge                                       requests in steps
    num_requests_waiting              gauge                                       requests in the queue
    prompt_tokens                     counter                                     of ended requests
    generation_tokens                 counter                                     tokens generated
    iteration_tokens_total            histogram                                   tokens of a step
    request_success                   counter    finished_reason                  requests, by how they ended
    spec_decode_num_draft_tokens      counter                                     drafts verified
    spec_decode_num_accepted_tokens   counter                                     drafts accepted
    time_to_first_token_seconds       histogram                                   arrival to first token
    request_time_per_output_token_seconds histogram                               mean after its first token
    e2e_request_latency_seconds       histogram                                   arrival to end
    request_prompt_tokens             histogram                                   of a request
    request_generation_tokens         histogram                                   of a request
    kv_tier_disk_outage          own  gauge                                       1 while it keeps nothing new
    kv_tier_shared_outage        own  gauge                                       1 while it is left alone

Prometheus shows counters with `_total` behind the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KEYS = (
    "kv_cache_usage_perc",
    "kv_cache_blocks",
    "kv_cache_evicted_blocks",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefix_cache_missed_tokens",
    "prefix_cache_short_tokens",
    "prefix_cache_evicted_ago_seconds",
    "kv_cache_learned_uses",
    "kv_cache_learned_waited_requests",
    "kv_cache_learned_worth",
    "num_preemptions",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
    "cache_config_info",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens",
    "generation_tokens",
    "iteration_tokens_total",
    "request_success",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "kv_tier_disk_outage",
    "kv_tier_shared_outage",
)


@dataclass(frozen=True)
class MetricNames:
    """`prefix` and the key, or the whole name given in `names`."""

    prefix: str = "vllm:"
    names: Mapping[str, str] = field(default_factory=dict)  # key -> whole name

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.names) - set(KEYS)):
            raise ValueError(f"expected names of {', '.join(KEYS)}, got {', '.join(unknown)}")
        every = [self.name_of(key) for key in KEYS]
        if repeated := sorted({name for name in every if every.count(name) > 1}):
            raise ValueError(f"expected a name of its own for each metric, got {', '.join(repeated)} twice")

    def name_of(self, key: str) -> str:
        """The whole name of a metric."""
        return self.names.get(key, self.prefix + key)

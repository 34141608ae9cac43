"""Replay over several replicas behind a router, in virtual time: each has its own cache and tells it by KV events.

Flow:    trace -> [run_fleet]: Timeline of RoutedReplicas -> FleetResult
Source:  `kvjax.replay.batching` for one replica, `kvjax.routing` for index and routers

With tiers each replica has host memory of its own, and a disk of its own or one that all share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.planning import KVCachePlan
from kvjax.replay.extent import ReplayExtent
from kvjax.replay.recorder import Recorder
from kvjax.replay.replay import SEED_TEXT, ReplayConfig, longest_request, plan_cache
from kvjax.replay.replicas.replica import Deployment, Replica
from kvjax.replay.replicas.routed_replicas import RoutedReplicas
from kvjax.replay.requests.job import Job
from kvjax.replay.requests.prompts import PromptMaker
from kvjax.replay.requests.trace import TraceRequest
from kvjax.replay.run import Run
from kvjax.tiers.stats import TierStats


@dataclass(frozen=True)
class FleetResult(ReplayExtent):
    """What a replay over several replicas found."""

    router: str  # of kvjax.routing.ROUTERS
    config: ReplayConfig  # of each replica
    plan: KVCachePlan  # likewise
    recorders: tuple[Recorder, ...]  # by replica
    tier_stats: tuple[TierStats, ...]  # likewise; none without tiers


def run_fleet(
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    num_replicas: int,
    router: str,
    on_progress: Callable[[int], object] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FleetResult:
    """Replays `trace` over `num_replicas` caches of `config`, each request on the replica that `router` picks.

    `on_progress` is called with the number of requests that were finished; `should_stop` is asked before every step.

    Raises:
        ValueError: the trace is empty, no replica, an unknown router, or a config of one request at a time, of miss
            reasons or of Belady's rule.
        MemoryBudgetError: the memory does not hold the cache of the longest request, or the blocks not one token.
    """
    if num_replicas < 1:
        raise ValueError(f"expected num_replicas >= 1, got {num_replicas}")
    run = Run(trace, config.block_size, on_progress)
    deployment = deployment_of(trace, config, run.arrivals.ended)
    disk = deployment.shared_disk()
    side = RoutedReplicas(deployment, [Replica.create(deployment, disk) for _ in range(num_replicas)], router)
    run.play(side.replicas, side.receive, should_stop)
    return FleetResult(
        router=router,
        config=config,
        plan=deployment.plan,
        recorders=side.recorders,
        tier_stats=side.tier_stats,
        **run.extent(side.ended_s),
    )


def deployment_of(
    trace: Sequence[TraceRequest], config: ReplayConfig, on_end: Callable[[Job, float], object]
) -> Deployment:
    """What replicas of `config` have in common for a trace.

    Raises:
        ValueError: a config of one request at a time, of miss reasons or of Belady's rule.
        MemoryBudgetError: the memory does not hold the cache of the longest request, or the blocks not one token.
    """
    if config.serial or config.explain_misses or config.eviction_policy == "belady":
        raise ValueError(
            "expected continuous batching under lru, slru or cost without miss reasons, got serial="
            f"{config.serial}, explain_misses={config.explain_misses}, eviction_policy={config.eviction_policy!r}"
        )
    longest = longest_request(trace, config)
    hasher = BlockHasher(config.hash_block_size, config.hash_algorithm, seed=SEED_TEXT)
    return Deployment(config, plan_cache(trace, config), longest, PromptMaker(trace, hasher), on_end)


__all__ = ["FleetResult", "deployment_of", "run_fleet"]

"""Replay with prefill and decode apart, in virtual time: some replicas compute prompts, others decode.

Flow:    trace -> [run_split]: a prefill replica computes the prompt and the first token -> its KV travels (PrefilledKV)
         -> a decode replica makes the rest -> SplitResult
Source:  kvjax.transfer's connectors, docs/guide/transfer.md

A request is routed twice, when it arrives and when its first token is there, by a router of each side; the one of the
decode side counts what a replica has cached as not to be sent. Its first token is the prefill replica's. The second one
waits for the transfer. A request of one token never leaves its prefill replica. Tiers belong to the prefill side. A
request that is preempted on the decode side computes its prompt there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.planning import KVCachePlan
from kvjax.replay.beyond.prefilled_kv import PrefilledKV, TransferConfig
from kvjax.replay.extent import ReplayExtent
from kvjax.replay.recorder import Recorder
from kvjax.replay.replay import ReplayConfig
from kvjax.replay.replicas.fleet import deployment_of
from kvjax.replay.replicas.replica import Deployment, Replica
from kvjax.replay.replicas.routed_replicas import RoutedReplicas
from kvjax.replay.requests.job import Job
from kvjax.replay.requests.trace import TraceRequest
from kvjax.replay.run import Run
from kvjax.replay.virtual_time.clock import VirtualClock
from kvjax.replay.virtual_time.timeline import Timeline
from kvjax.tiers.stats import TierStats


@dataclass(frozen=True)
class SplitConfig:
    """How many replicas do what, and what is between them."""

    num_prefill: int
    num_decode: int
    transfer: TransferConfig = field(default_factory=TransferConfig)

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ValueError(f"expected replicas on both sides, got {self.num_prefill} and {self.num_decode}")


@dataclass(frozen=True)
class SplitResult(ReplayExtent):
    """What a replay with prefill and decode apart found."""

    router: str  # of kvjax.routing.ROUTERS, on each side
    config: ReplayConfig  # of each replica; its tiers are those of prefill replicas
    split: SplitConfig
    plan: KVCachePlan  # of each replica
    prefill: tuple[Recorder, ...]  # by replica
    decode: tuple[Recorder, ...]  # likewise
    tier_stats: tuple[TierStats, ...]  # by prefill replica; none without tiers
    sent_bytes: int
    sent_tokens: int
    num_transfers: int


def run_split(
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    split: SplitConfig,
    router: str,
    on_progress: Callable[[int], object] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> SplitResult:
    """Replays `trace` over prefill and decode replicas with caches of `config`.

    `on_progress` is called with the number of requests that were finished; `should_stop` is asked before every step.

    Raises:
        ValueError: the trace is empty, an unknown router, or a config of one request at a time, of miss reasons or of
            Belady's rule.
        MemoryBudgetError: the memory does not hold the cache of the longest request, or the blocks not one token.
    """
    run = Run(trace, config.block_size, on_progress)
    sides = _Sides(deployment_of(trace, config, run.arrivals.ended), run.timeline, split, router)
    run.play((*sides.prefill.replicas, *sides.decode.replicas), sides.arrive, should_stop)
    return SplitResult(
        router=router,
        config=config,
        split=split,
        plan=sides.deployment.plan,
        prefill=sides.prefill.recorders,
        decode=sides.decode.recorders,
        tier_stats=sides.prefill.tier_stats,
        sent_bytes=sum(one.link.num_bytes for one in sides.incoming),
        sent_tokens=sum(one.num_tokens for one in sides.incoming),
        num_transfers=sum(one.num_transfers for one in sides.incoming),
        **run.extent(max(sides.prefill.ended_s, sides.decode.ended_s)),
    )


class _Sides:
    """Both sides of one run, and the links between them."""

    def __init__(self, deployment: Deployment, timeline: Timeline, split: SplitConfig, router: str) -> None:
        self.deployment = deployment
        self.timeline = timeline
        self.incoming: list[PrefilledKV] = []  # by decode replica
        self._split = split
        self._outgoing = [split.transfer.link() for _ in range(split.num_prefill)]
        disk = deployment.shared_disk()
        prefill = [
            Replica.create(deployment, disk, on_handover=partial(self._hand_over, number))
            for number in range(split.num_prefill)
        ]
        decoding = deployment.without_tiers()
        decode = [Replica.create(decoding, external=self._receiver) for _ in range(split.num_decode)]
        self.prefill = RoutedReplicas(deployment, prefill, router)
        self.decode = RoutedReplicas(decoding, decode, router)

    def arrive(self, job: Job) -> None:
        """A request comes: its prompt and first token are a prefill replica's."""
        job.max_tokens = 1
        job.goes_on = job.source.output_length > 1
        self.prefill.receive(job)

    def _receiver(self, clock: VirtualClock, manager: KVCacheManager) -> PrefilledKV:
        self.incoming.append(PrefilledKV.create(clock, self._split.transfer, manager))
        return self.incoming[-1]

    def _hand_over(self, sender: int, job: Job) -> None:
        """A prefill replica is at the end of the step that made the first token."""
        self.timeline.at(job.first_token_s, partial(self._go_on, sender, job))

    def _go_on(self, sender: int, job: Job) -> None:
        """The rest of the tokens are a decode replica's."""
        request = job.request
        assert request is not None  # it has run
        request.num_computed_tokens = request.num_preemptions = 0
        rest = Job(
            job.index,
            job.source,
            asked_s=job.asked_s,
            arrives_s=job.first_token_s,
            max_tokens=job.source.output_length,
            first_token_s=job.first_token_s,
        )
        receiver = self.decode.submit(rest, request)
        self.incoming[receiver].expect(request.request_id, self._outgoing[sender])


__all__ = ["SplitConfig", "SplitResult", "run_split"]

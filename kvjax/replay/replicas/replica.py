"""One replica of a deployment: its cache, its run in virtual time, and what its events have told.

Flow:    Job -> [Replica.submit] -> BatchedReplay; Replica.take_events -> PrefixIndex; Replica.state -> Router
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.watch.kv_events import KVCacheEvent
from kvjax.planning import KVCachePlan
from kvjax.replay.batching import BatchedReplay
from kvjax.replay.beyond.external_kv import ExternalKV
from kvjax.replay.beyond.tiers import ReplayDisk, ReplayTiers
from kvjax.replay.recorder import Recorder
from kvjax.replay.replay import ReplayConfig, manager_over
from kvjax.replay.requests.job import Job
from kvjax.replay.requests.prompts import PromptMaker
from kvjax.replay.virtual_time.clock import VirtualClock
from kvjax.routing import ReplicaState


@dataclass(frozen=True)
class Deployment:
    """What all replicas of a run have in common."""

    config: ReplayConfig
    plan: KVCachePlan
    longest: int  # tokens of a request, at most
    prompts: PromptMaker
    on_end: Callable[[Job, float], object]  # called with jobs that have ended or are refused, and when

    def without_tiers(self) -> Deployment:
        """The same, of replicas that have their pools alone."""
        return replace(self, config=replace(self.config, tiers=None))

    def shared_disk(self) -> ReplayDisk | None:
        """A disk for several replicas; None: each has its own, or none."""
        tiers = self.config.tiers
        if tiers is None or not tiers.shares_disk or not tiers.disk_bytes:
            return None
        return ReplayDisk(tiers, self.plan.config)


@dataclass
class Replica:
    """One replica's run, and what it has told."""

    simulation: BatchedReplay
    tiers: ReplayTiers | None
    told: deque[tuple[float, list[KVCacheEvent]]] = field(default_factory=deque)  # virtual seconds, events of a step

    @classmethod
    def create(
        cls,
        of: Deployment,
        disk: ReplayDisk | None = None,
        external: Callable[[VirtualClock, KVCacheManager], ExternalKV] | None = None,
        on_handover: Callable[[Job], object] = lambda job: None,
    ) -> Replica:
        """A replica with an empty cache. `disk`: one that it shares; `external`: what brings KV, in place of tiers."""
        config, clock, tiers = of.config, VirtualClock(), None
        if config.tiers is not None:
            tiers = ReplayTiers(config.tiers, of.plan.config, lambda: clock.now_s, disk=disk)
        options = replace(config.manager_options, enable_kv_cache_events=True)
        manager = manager_over(tiers, of.plan, of.longest, config.hash_block_size, options)
        simulation = BatchedReplay(
            deque(),
            manager,
            of.prompts,
            Recorder(manager.block_pools, config.block_size),
            clock,
            config.speed,
            config.batching,
            of.on_end,
            external=tiers if external is None else external(clock, manager),
            on_handover=on_handover,
        )
        return cls(simulation, tiers)

    @property
    def recorder(self) -> Recorder:
        """What was measured here."""
        return self.simulation.recorder

    @property
    def next_step_s(self) -> float:
        """When the next step begins; infinite: there is nothing to do."""
        return self.simulation.next_step_s

    def submit(self, job: Job) -> None:
        """Adds a job that arrives no earlier than those before it."""
        self.simulation.arrivals.append(job)

    def step(self) -> None:
        """Runs one step."""
        self.simulation.step()
        events = self.simulation.manager.take_events()
        if events:
            self.told.append((self.simulation.clock.now_s, events))

    def take_events(self, until_s: float) -> list[KVCacheEvent]:
        """Events of steps that have ended by then and were not taken yet."""
        taken: list[KVCacheEvent] = []
        while self.told and self.told[0][0] <= until_s:
            taken += self.told.popleft()[1]
        return taken

    def state(self, hit_tokens: int) -> ReplicaState:
        """The replica as the router sees it, for a request of which it has `hit_tokens`."""
        table, rows = self.simulation.manager.request_table, self.simulation.seated_rows
        left = np.maximum(table.num_prompt_tokens[rows] - table.num_computed_tokens[rows], 0)
        queued = list(self.simulation.queued)
        return ReplicaState(
            hit_tokens=hit_tokens,
            prefill_tokens=int(left.sum()) + sum(job.expected_tokens for job in queued),
            held_tokens=int(table.num_tokens[rows].sum()) + sum(job.source.input_length for job in queued),
        )


__all__ = ["Deployment", "Replica"]

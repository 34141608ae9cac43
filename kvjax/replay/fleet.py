"""Replay over several replicas behind a router, in virtual time: each has its own cache and tells it by KV events.

Flow:    trace -> [run_fleet]: PrefixIndex.match -> Router.pick -> BatchedReplay of a replica -> KV events -> index
Source:  `kvjax.replay.batching` for one replica, `kvjax.routing` for index and routers

A request is routed when it arrives. By then the index knows the events of all steps that have ended, and no others: a
step that is under way has told nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher, BlockHashListWithBlockSize
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig
from kvjax.core.watch.kv_events import KVCacheEvent
from kvjax.planning import KVCachePlan
from kvjax.replay.batching import BatchedReplay
from kvjax.replay.clock import VirtualClock
from kvjax.replay.infinite_cache import InfiniteCache
from kvjax.replay.prompts import PromptMaker
from kvjax.replay.recorder import Recorder
from kvjax.replay.replay import SEED_TEXT, ReplayConfig, longest_request, no_garbage_collection, plan_cache
from kvjax.replay.trace import TraceRequest
from kvjax.routing import PrefixIndex, ReplicaState, make_router


@dataclass(frozen=True)
class FleetResult:
    """What a replay over several replicas found."""

    router: str  # of kvjax.routing.ROUTERS
    config: ReplayConfig  # of each replica
    plan: KVCachePlan  # likewise
    recorders: tuple[Recorder, ...]  # by replica
    num_requests: int  # of the trace
    num_done: int  # of them, those that ended or were refused
    virtual_seconds: float
    wall_seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether the replay went to the trace's end; else it was stopped between two steps."""
        return self.num_done == self.num_requests


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
    if config.serial or config.explain_misses or config.eviction_policy == "belady":
        raise ValueError(
            "expected continuous batching under lru, slru or cost without miss reasons, got serial="
            f"{config.serial}, explain_misses={config.explain_misses}, eviction_policy={config.eviction_policy!r}"
        )
    if not trace or num_replicas < 1:
        raise ValueError(f"expected requests and replicas, got {len(trace)} and {num_replicas}")
    chosen = make_router(router)
    start = perf_counter()
    longest = longest_request(trace, config)
    plan = plan_cache(longest, config)
    num_done = 0

    def count(num_finished: int) -> None:
        nonlocal num_done
        num_done += num_finished
        on_progress(num_finished)

    group_idx = _longest_lasting_group(plan.config)
    block_size = plan.config.kv_cache_groups[group_idx].kv_cache_spec.block_size
    index = PrefixIndex(num_replicas, group_idx)
    prompts = PromptMaker(trace, BlockHasher(config.hash_block_size, config.hash_algorithm, seed=SEED_TEXT))
    infinite = InfiniteCache(config.block_size)
    replicas = [_Replica.create(plan, longest, config, count, should_stop) for _ in range(num_replicas)]
    with no_garbage_collection():
        for place, source in enumerate(trace):
            for number, replica in enumerate(replicas):
                replica.advance(source.timestamp_ms / 1e3)
                index.apply(number, replica.take_events(source.timestamp_ms / 1e3))
            if should_stop():
                break
            request = prompts.make(str(place), source)
            hashes = _hashes_of_blocks(request, config.hash_block_size, block_size)
            whole = (source.input_length - 1) // block_size
            hits = [min(matched, whole) * block_size for matched in index.match(hashes)]
            states = [replica.state(hit) for replica, hit in zip(replicas, hits, strict=True)]
            number = chosen.pick(source.input_length, states)
            replicas[number].submit(source, request, infinite.lookup_and_add(source), hits[number])
        for replica in replicas:
            replica.advance(inf)
    return FleetResult(
        router=router,
        config=config,
        plan=plan,
        recorders=tuple(replica.simulation.recorder for replica in replicas),
        num_requests=len(trace),
        num_done=num_done,
        virtual_seconds=max(replica.simulation.clock.now_s for replica in replicas),
        wall_seconds=perf_counter() - start,
    )


@dataclass
class _Routed:
    """The requests that one replica got, made by the router: its simulation asks for them in the same order."""

    sources: list[TraceRequest] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    ceilings: deque[int] = field(default_factory=deque)  # tokens, of those that have not arrived
    expected: list[int] = field(default_factory=list)  # tokens to prefill, by what the router knew

    def make(self, request_id: str, source: TraceRequest) -> Request:
        return self.requests.pop(int(request_id))

    def lookup_and_add(self, request: TraceRequest) -> int:
        return self.ceilings.popleft()


@dataclass
class _Replica:
    """One replica's simulation, and what it has told."""

    simulation: BatchedReplay
    routed: _Routed
    told: deque[tuple[float, list[KVCacheEvent]]] = field(default_factory=deque)  # virtual seconds, events of a step

    @classmethod
    def create(
        cls,
        plan: KVCachePlan,
        longest: int,
        config: ReplayConfig,
        on_progress: Callable[[int], object],
        should_stop: Callable[[], bool],
    ) -> _Replica:
        manager = KVCacheManager(
            plan.config,
            longest,
            config.hash_block_size,
            enable_kv_cache_events=True,
            max_in_flight_tokens=plan.max_in_flight_tokens,
            free_order=config.free_order,
            retention_interval=config.retention_interval,
            eviction_policy=config.eviction_policy,
        )
        routed = _Routed()
        recorder, clock = Recorder(manager.block_pools, config.block_size), VirtualClock()
        simulation = BatchedReplay(
            routed.sources,
            manager,
            routed,
            routed,
            recorder,
            clock,
            config.speed,
            config.batching,
            on_progress,
            should_stop,
        )
        return cls(simulation, routed)

    def submit(self, source: TraceRequest, request: Request, ceiling: int, hit_tokens: int) -> None:
        """Adds a request that arrives now."""
        self.routed.requests[len(self.routed.sources)] = request
        self.routed.ceilings.append(ceiling)
        self.routed.expected.append(source.input_length - hit_tokens)
        self.routed.sources.append(source)

    def advance(self, until_s: float) -> None:
        """Runs the steps that begin before `until_s`."""
        simulation = self.simulation
        while simulation.has_work and simulation.clock.now_s < until_s and not simulation.should_stop():
            simulation.step()
            events = simulation.manager.take_events()
            if events:
                self.told.append((simulation.clock.now_s, events))

    def take_events(self, until_s: float) -> list[KVCacheEvent]:
        """Events of steps that have ended by then and were not taken yet."""
        taken: list[KVCacheEvent] = []
        while self.told and self.told[0][0] <= until_s:
            taken += self.told.popleft()[1]
        return taken

    def state(self, hit_tokens: int) -> ReplicaState:
        """The replica as the router sees it, for a request of which it has `hit_tokens`."""
        table, rows = self.simulation.manager.request_table, self.simulation.running_rows
        left = np.maximum(table.num_prompt_tokens[rows] - table.num_computed_tokens[rows], 0)
        queued = list(range(len(self.routed.sources) - len(self.routed.ceilings), len(self.routed.sources)))
        queued += [job.index for job in self.simulation.waiting]
        return ReplicaState(
            hit_tokens=hit_tokens,
            prefill_tokens=int(left.sum()) + sum(self.routed.expected[i] for i in queued),
            held_tokens=int(table.num_tokens[rows].sum()) + sum(self.routed.sources[i].input_length for i in queued),
        )


def _longest_lasting_group(config: KVCacheConfig) -> int:
    """The group whose blocks stand for whole prefixes: the first that keeps all tokens, else the first."""
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    whole = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
    return next((i for i, kind in enumerate(kinds) if kind in whole), 0)


def _hashes_of_blocks(request: Request, hash_block_size: int, block_size: int) -> Sequence[BlockHash]:
    """Hashes of a request's blocks as its group has them."""
    if block_size == hash_block_size:
        return request.block_hashes
    return list(BlockHashListWithBlockSize(request.block_hashes, hash_block_size, block_size))


__all__ = ["FleetResult", "run_fleet"]

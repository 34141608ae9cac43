"""One replay from its configuration to its result.

Flow:    trace, ReplayConfig -> [run_replay] -> ReplayResult -> kvjax.replay.reports.report
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, lcm
from pathlib import Path
from typing import Any

from kvjax.core.eviction import DEFAULT_POLICY, EVICTION_POLICIES
from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.options.manager_options import AUTO, ManagerOptions
from kvjax.core.record.call_recorder import CallRecorder
from kvjax.core.spec import KVCacheSpec
from kvjax.core.watch.residency_metrics import KVCacheEvictionEvent, KVCacheMetricsCollector
from kvjax.planning import CacheShape, KVCachePlan, Load, Parallelism, plan_kv_cache
from kvjax.replay.batching import BatchedReplay, BatchingConfig
from kvjax.replay.beyond.tiers import ReplayTierConfig, ReplayTiers
from kvjax.replay.bounds.belady import BeladyPolicy, LookAhead
from kvjax.replay.extent import ReplayExtent
from kvjax.replay.garbage import no_garbage_collection
from kvjax.replay.misses import MissCounts
from kvjax.replay.recorder import Recorder
from kvjax.replay.requests.prompts import PromptMaker
from kvjax.replay.requests.trace import TraceRequest
from kvjax.replay.run import Run
from kvjax.replay.serial import replay_serial
from kvjax.replay.virtual_time.clock import VirtualClock
from kvjax.replay.virtual_time.speed_model import SpeedModel
from kvjax.replay.working_set import load_of
from kvjax.tiers.stats import TierStats

REPLAY_POLICIES = (*EVICTION_POLICIES, "belady")
SEED_TEXT = "kvjax-replay"  # fixed, so that two runs compute the same hashes


@dataclass(frozen=True)
class ReplayConfig:
    """What to replay on. `num_blocks` are those of each pool, the null block included, as of `EngineConfig`."""

    specs: dict[str, KVCacheSpec]
    num_blocks: int | None = None
    memory_bytes: int | None = None
    load: Load | None = None  # that several pools are balanced for, beside what runs; None: that of the trace
    hash_algorithm: str = "sha256_cbor"
    eviction_policy: str = DEFAULT_POLICY  # of REPLAY_POLICIES
    retention_interval: int | str | None = AUTO  # tokens between checkpoints of windows, chunks and states; None: all
    release: str | None = None  # of vLLM, whose exact rules stand in place of the two above
    serial: bool = False
    platform: str = "gpu"
    tensor_parallel: int = 1
    hybrid: bool = True
    one_memory: bool | None = None  # whether pools of unlike pages share the memory; None: see `shares_memory`
    speed: SpeedModel = field(default_factory=SpeedModel)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    residency_sample_rate: float = 0.01
    explain_misses: bool = False  # costs time, which counts as the managers'
    tiers: ReplayTierConfig | None = None
    max_evicted_blocks: int = 1_000_000  # of each pool, that explanations remember: 250 bytes each

    @property
    def block_size(self) -> int:
        """Tokens a block; of several sizes the LCM, whose multiples are hits."""
        return lcm(*(spec.block_size for spec in self.specs.values()))

    @property
    def hash_block_size(self) -> int:
        """Tokens a hash: the blocks of every layer are multiples."""
        return gcd(*(spec.block_size for spec in self.specs.values()))

    @property
    def shares_memory(self) -> bool:
        """Whether they do: as told, else where bytes are given, no load to split by, and a policy that ranks blocks."""
        if self.one_memory is None:
            return self.memory_bytes is not None and self.load is None and self.manager_options.may_share_slabs
        return self.one_memory

    @property
    def manager_options(self) -> ManagerOptions:
        """What is cached and evicted; `eviction_policy` may be "belady"."""
        if self.release is not None:
            return ManagerOptions.vllm(self.release)
        return ManagerOptions(eviction_policy=self.eviction_policy, retention_interval=self.retention_interval)


@dataclass(frozen=True)
class ReplayResult(ReplayExtent):
    """What a replay found."""

    config: ReplayConfig
    plan: KVCachePlan
    recorder: Recorder
    residencies: tuple[KVCacheEvictionEvent, ...]  # of the sampled blocks whose contents went
    misses: MissCounts  # of first admissions; empty unless misses are explained
    tier_stats: TierStats | None  # None: no tiers


def run_replay(
    trace: Sequence[TraceRequest],
    config: ReplayConfig,
    on_progress: Callable[[int], object] = lambda count: None,
    record_to: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ReplayResult:
    """Replays `trace`; `on_progress` is called with the number of requests that were finished.

    `should_stop` is asked before every step and arrival; once it says so, the result is what there is by then.

    With `record_to` all calls of the manager are written there, for `kvjax.core.replay_calls`; host times include it.

    Raises:
        ValueError: the trace is empty, or the config has neither or both of blocks and memory, bad values, or Belady's
            rule beside a release's, or in batches where requests wait for answers.
        NotImplementedError: a record of Belady's rule.
        MemoryBudgetError: the memory does not hold the cache of the longest request, or the blocks not one token.
        OSError: the record cannot be written.
    """
    if config.eviction_policy not in REPLAY_POLICIES:
        raise ValueError(f"expected eviction_policy of {', '.join(REPLAY_POLICIES)}, got {config.eviction_policy!r}")
    if config.release is not None and config.eviction_policy == "belady":
        raise ValueError(
            f"expected release=None with eviction_policy='belady', got {config.release!r}: rules decide it"
        )
    if record_to is not None and config.eviction_policy == "belady":
        raise NotImplementedError(
            f"expected eviction_policy of {', '.join(EVICTION_POLICIES)} to record calls, got 'belady': it decides by "
            "the trace, which a record of calls does not hold"
        )
    run = Run(trace, config.block_size, on_progress)
    longest = longest_request(trace, config)
    plan = plan_cache(trace, config)
    clock = VirtualClock()
    look_ahead = _look_ahead(trace, config, plan)
    collector = KVCacheMetricsCollector(config.residency_sample_rate, clock=clock.now_ns)
    options = config.manager_options
    if look_ahead is not None:
        options = replace(options, eviction_policy=partial(BeladyPolicy, look_ahead=look_ahead))
    reasons = None
    if config.explain_misses:
        reasons = MissReasons(config.max_evicted_blocks, max_reports=len(trace), clock=clock.now_ns)
    tiers = None
    if config.tiers is not None:
        tiers = ReplayTiers(config.tiers, plan.config, lambda: clock.now_s, takes_time=not config.serial)
    observers = {"metrics_collector": collector, "miss_reasons": reasons}
    manager = manager_over(tiers, plan, longest, config.hash_block_size, options, **observers)
    recorder = Recorder(manager.block_pools, config.block_size)
    hasher = BlockHasher(config.hash_block_size, config.hash_algorithm, seed=SEED_TEXT)
    prompts = PromptMaker(trace, hasher)
    if look_ahead is not None:
        recorder.on_decision, prompts.on_made = look_ahead.advance, look_ahead.learn
    with no_garbage_collection(), _recorded(manager, record_to) as called:
        if config.serial:
            count = run.arrivals.count
            replay_serial(trace, called, prompts, run.infinite, recorder, clock, count, should_stop, tiers)
        else:
            parts = (called, prompts, recorder, clock, config.speed, config.batching, run.arrivals.ended, tiers)
            simulation = BatchedReplay(deque(), *parts)
            run.play([simulation], simulation.arrivals.append, should_stop)
    return ReplayResult(
        config=config,
        plan=plan,
        recorder=recorder,
        residencies=tuple(collector.drain_events()),
        misses=MissCounts.of(() if reasons is None else reasons.reports),
        tier_stats=None if tiers is None else tiers.stats,
        **run.extent(clock.now_s),
    )


def manager_over(
    tiers: ReplayTiers | None,
    plan: KVCachePlan,
    max_model_len: int,
    hash_block_size: int,
    options: ManagerOptions,
    **named: Any,
) -> KVCacheManager:
    """The manager of a plan's pools above tiers, if there are any; `named`: more that `KVCacheManager` takes."""
    manager = KVCacheManager(
        plan.config,
        max_model_len,
        hash_block_size,
        options,
        max_in_flight_tokens=plan.max_in_flight_tokens,
        tier=None if tiers is None else tiers.scheduler,
        **named,
    )
    if tiers is not None:
        tiers.scheduler.bind_kv_cache_manager(manager)
    return manager


def _look_ahead(trace: Sequence[TraceRequest], config: ReplayConfig, plan: KVCachePlan) -> LookAhead | None:
    """What Belady's rule knows; None for other policies."""
    if config.eviction_policy != "belady":
        return None
    if not config.serial and any(request.after >= 0 for request in trace):
        raise ValueError(
            "expected serial=True for eviction_policy='belady' where requests wait for answers, got batches: these "
            "decide the order"
        )
    return LookAhead(trace, config.block_size, num_blocks=min(pool.num_blocks for pool in plan.pools) - 1)


def longest_request(trace: Sequence[TraceRequest], config: ReplayConfig) -> int:
    """Tokens of the longest request, with those that it writes."""
    if config.serial:
        return max(request.input_length for request in trace)
    return max(request.input_length + max(request.output_length, 1) for request in trace)  # as `Job.max_tokens`


def plan_cache(trace: Sequence[TraceRequest], config: ReplayConfig) -> KVCachePlan:
    """A cache for the requests of `trace`, or for as long ones as it holds: what is longer is refused in the replay.

    Raises:
        MemoryBudgetError: it does not hold any request.
    """
    longest = longest_request(trace, config)
    in_flight = longest if config.serial else config.batching.max_num_batched_tokens
    parallel = Parallelism(tensor=config.tensor_parallel)
    shape = CacheShape.of(config.specs, platform=config.platform, parallel=parallel, hybrid=config.hybrid)
    max_running = 1 if config.serial else config.batching.max_num_seqs
    load = config.load
    if config.num_blocks is not None:
        longest = max(shape.longest_request_in([config.num_blocks] * shape.num_pools, longest, in_flight), 1)
    if config.memory_bytes is not None:
        longest = shape.longest_request(config.memory_bytes, longest, in_flight) or longest
    if config.memory_bytes is not None and load is None and shape.num_pools > 1 and not config.shares_memory:
        load = load_of(
            trace,
            shape,
            config.memory_bytes,
            alignment=config.block_size,
            max_model_len=longest,
            max_in_flight_tokens=in_flight,
            max_running=max_running,
            has_answers=not config.serial,
        )
    elif load is not None and load.max_running is not None:
        load = replace(load, max_running=max_running)
    return plan_kv_cache(
        config.specs,
        max_model_len=longest,
        memory_bytes=config.memory_bytes,
        num_blocks=config.num_blocks,
        max_in_flight_tokens=in_flight,
        load=load,
        platform=config.platform,
        tensor_parallel=config.tensor_parallel,
        hybrid=config.hybrid,
        one_memory=config.shares_memory,
    )


@contextmanager
def _recorded(manager: KVCacheManager, path: Path | None) -> Iterator[KVCacheManager]:
    """The manager, or what records its calls."""
    if path is None:
        yield manager
    else:
        with CallRecorder(manager, path) as recorder:
            yield recorder.manager

"""Host loops of several data ranks as one: each rank has requests and a manager of its own, and all step together.

Flow:    EngineRequest -> [RankLoops.add: a rank] -> HostLoop of the rank -> RankSteps -> device -> StepOutputs of all
Source:  a scheduler over one block pool per data rank: tpu-inference; docs/parallelism.md

A request goes to the rank where it ends soonest: that with the fewest tokens to hold and compute, its own that the rank
has not cached included. Less urgent requests that wait do not count. Of equal ranks it goes to the first. Samples of
one prompt go together. A request stays there.
All of it follows from the order of calls alone, so processes that see the same calls choose the same.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core import KVCacheManager, Request
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.outputs import GenerationResult, StepOutputs
from kvjax.engine.requests.owed_request import OwedRequest
from kvjax.engine.requests.stats import PoolUse, StepStats
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.engine.scheduling.scheduler import Scheduler
from kvjax.engine.step.host_loop import HostLoop, HostStep
from kvjax.engine.step.sampled_step import SampledStep
from kvjax.errors import UnknownRequestError


@dataclass(frozen=True)
class RankSteps:
    """A step of all data ranks."""

    by_rank: tuple[HostStep | None, ...]  # None: the rank has nothing to run
    idle_sampling: Any  # the sampling inputs of a rank without a step


@dataclass(frozen=True)
class RankPin:
    """A prefix that is pinned on one rank."""

    rank: int
    prefix: PinnedPrefix

    @property
    def num_tokens(self) -> int:
        """Tokens of the hit that stays."""
        return self.prefix.num_tokens


@dataclass(frozen=True)
class _Undelivered:
    """Outputs that a loop before could not return."""

    outputs: StepOutputs


class RankSchedulers:
    """What an engine asks of the schedulers of all ranks."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.by_rank = tuple(schedulers)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return sum(one.num_unfinished for one in self.by_rank)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return sum(one.num_waiting for one in self.by_rank)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return sum(one.num_running for one in self.by_rank)

    @property
    def num_loading(self) -> int:
        """Requests whose blocks are on their way."""
        return sum(one.num_loading for one in self.by_rank)

    def end_loads(self, loaded: Iterable[str], failed: Iterable[str]) -> None:
        """As of each: a request is known to one."""
        for one in self.by_rank:
            one.end_loads(loaded, failed)

    def check_fits(self, request: EngineRequest) -> None:
        """As `Scheduler.check_fits`: all ranks have the same limits."""
        self.by_rank[0].check_fits(request)

    def check_invariants(self) -> None:
        """As of every scheduler."""
        for one in self.by_rank:
            one.check_invariants()


class RankLoops:
    """One `HostLoop` for each data rank. Owned by one thread; a step costs the sum of theirs."""

    def __init__(self, loops: Sequence[HostLoop], *, num_step_stats: int) -> None:
        self.by_rank = tuple(loops)
        self.scheduler = RankSchedulers([loop.scheduler for loop in loops])
        self.step_stats: deque[StepStats] = deque(maxlen=num_step_stats)

    @property
    def managers(self) -> tuple[KVCacheManager, ...]:
        """That of each rank."""
        return tuple(loop.manager for loop in self.by_rank)

    @property
    def manager(self) -> KVCacheManager:
        """One rank would have one manager; several have `managers`.

        Raises:
            ValueError: always; `managers` has those of all ranks.
        """
        raise ValueError(f"expected one data rank, got {len(self.by_rank)}; read `managers`")

    @property
    def sampling(self) -> SamplingTable:
        """A rank's table: an example of its inputs."""
        return self.by_rank[0].sampling

    @property
    def requests(self) -> MutableMapping[str, EngineRequest]:
        """Unfinished requests of all ranks, by id."""
        return ChainMap(*(loop.requests for loop in self.by_rank))

    @property
    def step_end(self) -> Any:
        """As of a `HostLoop`: something while the newest outputs have not reached the caller."""
        return next((loop.step_end for loop in self.by_rank if loop.step_end is not None), None)

    @step_end.setter
    def step_end(self, value: None) -> None:
        for loop in self.by_rank:
            loop.step_end = value

    @property
    def undelivered(self) -> _Undelivered | None:
        """As of a `HostLoop`: outputs of loops that these have taken over."""
        ends = [loop.undelivered for loop in self.by_rank]
        outputs = [end.outputs for end in ends if end is not None and end.outputs is not None]
        return _Undelivered(join_outputs(outputs)) if outputs else None

    @undelivered.setter
    def undelivered(self, value: None) -> None:
        for loop in self.by_rank:
            loop.undelivered = value

    def add(self, samples: Sequence[EngineRequest]) -> None:
        """Queues the samples of one prompt on the rank chosen for them.

        Raises:
            ValueError: they can never run. Nothing is changed.
        """
        self.by_rank[self.pick_rank(samples[0])].add(samples)

    def pick_rank(self, request: EngineRequest) -> int:
        """The rank where the request ends soonest."""
        costs = [_load(loop, request) - loop.manager.get_computed_blocks(request.request)[1] for loop in self.by_rank]
        return int(np.argmin(costs))

    def rank_of(self, request_id: str) -> int:
        """Where an unfinished request is.

        Raises:
            UnknownRequestError: no unfinished request has that id.
        """
        for rank, loop in enumerate(self.by_rank):
            if request_id in loop.requests:
                return rank
        raise UnknownRequestError(f"expected the id of an unfinished request, got {request_id!r}")

    def abort(self, request_id: str) -> GenerationResult:
        """Ends a request now; what it has so far.

        Raises:
            UnknownRequestError: no unfinished request has that id.
        """
        return self.by_rank[self.rank_of(request_id)].abort(request_id)

    def owed(self) -> list[OwedRequest]:
        """As of a `HostLoop`: of each rank in turn."""
        return [one for loop in self.by_rank for one in loop.owed()]

    def pin(self, request: Request) -> RankPin | None:
        """Keeps what is cached of a prompt, on the rank that has most of it; None: none has any.

        Raises:
            OutOfBlocksError: too few blocks would be left for the longest request. Nothing is changed.
        """
        found = [manager.get_computed_blocks(request)[1] for manager in self.managers]
        rank = int(np.argmax(found))
        prefix = self.managers[rank].pin(request)
        return None if prefix is None else RankPin(rank, prefix)

    def unpin(self, pin: Any) -> None:  # what `pin` gave
        """Lets a prefix go.

        Raises:
            BlockStateError: it is not pinned there. Nothing is changed.
        """
        self.managers[pin.rank].unpin(pin.prefix)

    def begin_step(self) -> RankSteps | None:
        """The next step of every rank that has one; None: none has."""
        steps = tuple(loop.begin_step() for loop in self.by_rank)
        if all(step is None for step in steps):
            return None
        return RankSteps(steps, self.sampling.empty_batch())

    def end_step(self, steps: RankSteps, sampled: SampledStep) -> StepOutputs:
        """Hands every rank its tokens."""
        outputs, stats = [], []
        for rank, (loop, step) in enumerate(zip(self.by_rank, steps.by_rank, strict=True)):
            if step is None:
                continue
            outputs.append(loop.end_step(step, sampled.of_rank(rank, len(self.by_rank))))
            stats.append(loop.step_stats[-1])
        idle = [loop for loop, step in zip(self.by_rank, steps.by_rank, strict=True) if step is None]
        self.step_stats.append(_joined_stats(stats, len(self.step_stats) and self.step_stats[-1].step, idle))
        return join_outputs(outputs)

    def take_over(self, broken: RankLoops) -> None:
        """As `HostLoop.take_over`, rank by rank."""
        self.step_stats = broken.step_stats
        for loop, before in zip(self.by_rank, broken.by_rank, strict=True):
            loop.take_over(before)

    def deliver(self) -> StepOutputs:
        """The outputs that loops before these could not return."""
        outputs = [loop.deliver() for loop in self.by_rank if loop.undelivered is not None]
        return join_outputs(outputs)


def _load(loop: HostLoop, request: EngineRequest) -> int:
    """Tokens that requests of a rank may come to hold before or beside another one."""
    others = loop.requests.values()
    waiting = RequestStatus.WAITING
    return sum(one.max_total_tokens for one in others if one.status is not waiting or one.urgency < request.urgency)


def join_outputs(parts: Sequence[StepOutputs]) -> StepOutputs:
    """The outputs of ranks one after another."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *map(len, parts)]).tolist()

    def moved(values: Callable[[StepOutputs], Mapping[int, Any]]) -> dict[int, Any]:
        return {start + i: x for start, part in zip(starts, parts, strict=False) for i, x in values(part).items()}

    return StepOutputs(
        np.concatenate([part.request_ids for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        moved(lambda part: part.results),
        moved(lambda part: part.texts),
        moved(lambda part: part.top_logprobs),
    )


def _joined_stats(parts: Sequence[StepStats], last_step: int, idle: Sequence[HostLoop]) -> StepStats:
    """Sums over ranks; pools of all ranks together."""
    sums: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts)
        for name in StepStats.__dataclass_fields__
        if name not in ("step", "pools")
    }
    pools = [part.pools for part in parts] + [loop.pool_uses() for loop in idle]
    by_pool = zip(*pools, strict=True)
    used = tuple(PoolUse(*map(sum, zip(*map(_numbers, of_pool), strict=True))) for of_pool in by_pool)
    return StepStats(**sums, step=last_step + 1, pools=used)


def _numbers(use: PoolUse) -> tuple[int, ...]:
    return tuple(getattr(use, name) for name in PoolUse.__dataclass_fields__)


__all__ = ["RankLoops", "RankPin", "RankSchedulers", "RankSteps", "join_outputs"]

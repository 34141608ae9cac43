"""The engine without its model: a step's inputs from the requests, and outputs from a step's tokens.

Flow:    EngineRequest -> [HostLoop.begin_step] -> HostStep -> device -> [HostLoop.end_step] -> StepOutputs
Source:  names of vLLM's LLMEngine

All that the host does for a step is here, and no jax: `begin_step` schedules (blocks are allocated), plans (numpy
arrays of the step) and counts the tokens as computed; `end_step` hands the sampled tokens to their requests. Python
looks at a request only when it starts, gets its first token or ends; the rest are columns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core import KVCacheManager, Request, StepDrafts, StepPlan
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.core.step.step_builder import PickShape, build_step_plan
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.outputs import FinishReason, GenerationResult, StepOutputs, TopLogprobs
from kvjax.engine.requests.owed_request import OwedRequest
from kvjax.engine.requests.stats import PoolUse, StepStats
from kvjax.engine.sampling.prompt_logprobs import GivenTokens, PromptScores
from kvjax.engine.sampling.sampler_lines import SamplerSizes, SamplerWrites
from kvjax.engine.sampling.sampling_table import SamplingBatch, SamplingTable
from kvjax.engine.scheduling.running_inputs import StepInputs
from kvjax.engine.scheduling.scheduled_step import NewTokens, ScheduledStep
from kvjax.engine.scheduling.scheduler import Scheduler
from kvjax.engine.step.recovery import StepEnd, restart
from kvjax.engine.step.sampled_step import SampledStep
from kvjax.errors import UnknownRequestError


@dataclass(frozen=True)
class HostStep:
    """A step that the device is to run, or runs."""

    scheduled: ScheduledStep
    plan: StepPlan
    sampling: SamplingBatch  # a line per row of logits
    sampler_writes: SamplerWrites | None  # into the sampler's state, before the step
    wants_best: bool  # whether a row asks for log-probabilities of best tokens
    given: GivenTokens | None  # tokens of prompts whose log-probabilities are asked for
    inputs: StepInputs
    host_us: float  # CPU time of `begin_step`
    device_drafts: Any | None = None  # int32 on the device, where drafts of the step are there: `Drafter.device_tokens`

    @property
    def by_rank(self) -> tuple[HostStep | None, ...]:
        """The step of each data rank: there is one."""
        return (self,)


class HostLoop:
    """Requests from `add` to their results, over one manager. Owned by one thread."""

    def __init__(
        self,
        manager: KVCacheManager,
        scheduler: Scheduler,
        *,
        num_step_stats: int,
        pick_shape: PickShape | None = None,  # of the plans' block tables
        sampler_sizes: SamplerSizes | None = None,  # None: the sampler knows no lines
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.sampling = SamplingTable(sizes=sampler_sizes)
        self._prompt_scores = PromptScores()
        self.requests: dict[str, EngineRequest] = {}  # unfinished, by id, in order of arrival
        self.step_end: StepEnd | None = None  # the newest step that was read; None: its outputs have reached the caller
        self.undelivered: StepEnd | None = None  # of a loop that this one has taken over
        self.manager = manager
        self.step_stats: deque[StepStats] = deque(maxlen=num_step_stats)
        self._pick_shape = pick_shape
        self._clock = clock
        self._num_steps = 0

    @property
    def managers(self) -> tuple[KVCacheManager, ...]:
        """The manager of each data rank: there is one."""
        return (self.manager,)

    def add(self, samples: Sequence[EngineRequest]) -> None:
        """Queues the samples of one prompt, the first first, behind all other requests.

        Raises:
            ValueError: they can never run. Nothing is changed.
        """
        for one in samples:  # all of one length: if the first is accepted, so are the others
            self.scheduler.add(one)
            self.requests[one.request_id] = one

    def abort(self, request_id: str) -> GenerationResult:
        """Ends a request now; what it has so far.

        Raises:
            UnknownRequestError: no unfinished request has that id.
        """
        if request_id not in self.requests:
            raise UnknownRequestError(f"expected the id of an unfinished request, got {request_id!r}")
        engine_request = self.requests[request_id]
        self.scheduler.abort(engine_request)
        del self.requests[request_id]
        return self._result(engine_request)

    def owed(self) -> list[OwedRequest]:
        """The unfinished requests as they stand, in order of arrival.

        Raises:
            ValueError: as `OwedRequest.of`.
        """
        rows = self.scheduler.running_rows
        return [
            OwedRequest.of(one, rows.logprobs_of(one, one.request.num_output_tokens)) for one in self.requests.values()
        ]

    def pin(self, request: Request) -> PinnedPrefix | None:
        """As `KVCacheManager.pin`."""
        return self.manager.pin(request)

    def unpin(self, prefix: Any) -> None:  # what `pin` gave
        """As `KVCacheManager.unpin`."""
        self.manager.unpin(prefix)

    def begin_step(self) -> HostStep | None:
        """The next step, its tokens counted as computed; None: nothing can run now."""
        start = time.thread_time()
        step = self.scheduler.schedule()
        if step is None:
            return None
        for request in step.admitted:
            self.sampling.start(request)
            self._prompt_scores.start(request)
        plan = build_step_plan(
            self.manager,
            step.rows,
            step.num_new_tokens,
            wants_logits=step.samples,
            last_token_source=step.token_source,
            drafts=self._propose(step),
            writes_encoder=self._writes_encoder(step),
            mrope=self.scheduler.inputs.mrope,
            pick_shape=self._pick_shape,
        )
        inputs = self.scheduler.inputs.take(plan)
        rows, places = step.sampled_places(plan.num_computed_tokens)
        sampling = self.sampling.batch(rows, places)
        writes = self.sampling.writes(plan, step.samples)
        given = self._prompt_scores.ask(plan)
        for request in self.scheduler.start(step):
            self.sampling.start(request)
        return HostStep(
            scheduled=step,
            plan=plan,
            sampling=sampling,
            sampler_writes=writes,
            wants_best=self.sampling.wants_best(sampling),
            given=given,
            inputs=inputs,
            host_us=(time.thread_time() - start) * 1e6,
            device_drafts=self._device_drafts(step),
        )

    def end_step(self, step: HostStep, sampled: SampledStep) -> StepOutputs:
        """Hands a step's tokens to their requests; steps end in the order in which they began."""
        start = time.thread_time()
        if step.given is not None and sampled.given is not None:
            step.given.put(*sampled.given)
        end = self.step_end = StepEnd.begin(step.scheduled, self.manager.request_table)
        num_sampled, num_accepted = step.plan.logits_indices.size, sampled.num_accepted
        if num_accepted is not None:
            num_accepted = num_accepted[: step.plan.logits_starts.size - 1]
        token_ids, logprobs = sampled.token_ids[:num_sampled], sampled.logprobs[:num_sampled]
        new = self.scheduler.update(step.scheduled, token_ids, logprobs, num_accepted)
        if new.first:
            now = self._clock()
            for place in new.first:
                new.requests[place].stats.first_token_time_s = now
        top_logprobs = {} if sampled.best is None else _top_logprobs(new, sampled.best)
        results = {place: self._result(new.requests[place]) for place in new.ended}
        columns = (new.request_ids, new.token_ids, new.logprobs)
        end.outputs = outputs = StepOutputs(*columns, results, _text_pieces(new), top_logprobs)
        for result in results.values():
            del self.requests[result.request_id]
        self._record(step, new.num_accepted, start)
        return outputs

    def _propose(self, step: ScheduledStep) -> StepDrafts | None:
        """What the drafter says that the step's requests go on with."""
        drafter = self.scheduler.drafter
        if drafter is None or step.num_drafts is None:
            return None
        return StepDrafts(step.num_drafts, *drafter.propose(step.rows, step.num_drafts, self.sampling))

    def take_over(self, broken: HostLoop) -> None:
        """Queues what `broken`, which an exception stopped anywhere, had not finished, and goes on with its statistics.

        `broken` is of no use once this has returned; until then it may be tried again with another new loop.
        """
        self.step_stats, self._num_steps = broken.step_stats, broken._num_steps
        for request in restart(broken.requests.values(), broken.step_end, broken.scheduler.running_rows):
            self.add([request])
        if broken.step_end is not None and broken.step_end.outputs is not None:
            self.undelivered = broken.step_end
        else:
            self.undelivered = broken.undelivered

    def deliver(self) -> StepOutputs:
        """The outputs that a loop before this one could not return."""
        self.step_end = self.undelivered
        self.undelivered = None
        if self.step_end is None or self.step_end.outputs is None:
            raise ValueError("expected outputs that are not delivered, got none")
        return self.step_end.outputs

    def _device_drafts(self, step: ScheduledStep) -> Any | None:
        """Where the step's drafts are, if on the device."""
        drafter = self.scheduler.drafter
        return None if drafter is None or step.num_drafts is None else drafter.device_tokens

    def _writes_encoder(self, step: ScheduledStep) -> np.ndarray | None:  # bool[S]
        """Whose encoder runs in the step: that of requests that start, whatever of their tokens was cached."""
        if not self.manager.groups.reads_encoder:
            return None
        return np.isin(step.rows, [engine_request.request.row for engine_request in step.admitted])

    def _result(self, engine_request: EngineRequest) -> GenerationResult:
        """What became of a request that ended."""
        request, stats, text = engine_request.request, engine_request.stats, engine_request.whole_text()
        error = engine_request.error
        stats.finish_time_s = self._clock()
        stats.num_output_tokens = request.num_output_tokens
        k = engine_request.params.logprobs
        return GenerationResult(
            request_id=engine_request.request_id,
            prompt_token_ids=np.array(request.prompt_token_ids, np.int32),
            output_token_ids=engine_request.output_token_ids(),
            logprobs=tuple(engine_request.logprobs),
            finish_reason=(engine_request.finish_reason or FinishReason.ABORT) if error is None else FinishReason.ERROR,
            stats=stats,
            text=text,
            error=error,
            sample=engine_request.sample,
            top_logprobs=TopLogprobs.joined(engine_request.top_logprobs, k) if k else None,
            prompt_logprobs=deepcopy(engine_request.prompt_logprobs),  # which the prompt's samples share
        )

    def _record(self, step: HostStep, num_accepted: int, start: float) -> None:
        scheduled, lookups = step.scheduled, step.scheduled.lookups
        self._num_steps += 1
        self.step_stats.append(
            StepStats(
                step=self._num_steps,
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                num_requests=scheduled.rows.size,
                num_new_tokens=int(scheduled.num_new_tokens.sum()),
                num_sampled_tokens=step.plan.logits_starts.size - 1 + num_accepted,
                num_hit_tokens=lookups.hits,
                num_queried_tokens=lookups.queries,
                num_refound_tokens=lookups.preempted_hits,
                num_requeried_tokens=lookups.preempted_queries,
                num_preemptions=scheduled.num_preemptions,
                pools=self.pool_uses(scheduled.num_released),
                host_us=step.host_us + (time.thread_time() - start) * 1e6,
                num_draft_tokens=0 if scheduled.num_drafts is None else int(scheduled.num_drafts.sum()),
                num_accepted_tokens=num_accepted,
            )
        )

    def pool_uses(self, num_released: Sequence[int] = ()) -> tuple[PoolUse, ...]:
        """What is in every pool now; `num_released` in a step, none without one."""
        uses = []
        pools = self.manager.block_pools
        for pool, released in zip(pools, num_released or [0] * len(pools), strict=True):
            num_cached, num_free = pool.num_cached_free_blocks, pool.num_free_blocks
            uses.append(PoolUse(pool.num_blocks - 1 - num_free, num_cached, num_free - num_cached, released))
        return tuple(uses)


def _text_pieces(new: NewTokens) -> dict[int, str]:
    """Text that new tokens complete, by place, of the requests that stream it."""
    if not new.looked_at:
        return {}
    requests = ((place, new.requests[place]) for place in new.looked_at)
    return {place: request.text.take() for place, request in requests if request.params.stream_text}


def _top_logprobs(new: NewTokens, best: TopLogprobs) -> dict[int, TopLogprobs]:
    """The best at new tokens, by place, for the requests that ask for them, which keep them too."""
    found = {}
    for place in new.looked_at:
        request, row = new.requests[place], slice(new.logits_rows[place], new.logits_rows[place] + 1)
        k = request.params.logprobs
        if k:
            found[place] = TopLogprobs(best.token_ids[row, :k], best.logprobs[row, :k], best.ranks[row])
            request.top_logprobs.append(found[place])
    return found

"""Replay of continuous batching in virtual time: the engine's scheduler, and a speed model in place of a model.

Flow:    Jobs -> [BatchedReplay.step]: Scheduler, SpeedModel -> Recorder; Jobs that others go on with
Source:  `kvjax.engine.scheduling`, whose steps these are

Time passes as the speed model says; every request whose tokens are all computed gets one more. Outputs are tokens that
no prompt has, so they never hit; blocks that they fill are hashed and registered all the same. What tiers or another
replica have of a request comes beside steps (`ExternalKV`). A request that the pools can never hold is refused before
it waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import thread_time_ns

import numpy as np

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.requests.token_ids import MAX_TOKEN_ID
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.scheduling.scheduled_step import ScheduledStep
from kvjax.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvjax.replay.beyond.external_kv import ExternalKV
from kvjax.replay.recorder import Recorder
from kvjax.replay.requests.job import Job
from kvjax.replay.requests.prompts import PromptMaker
from kvjax.replay.virtual_time.clock import VirtualClock
from kvjax.replay.virtual_time.speed_model import SpeedModel


@dataclass(frozen=True)
class BatchingConfig:
    """Bounds of a step."""

    max_num_batched_tokens: int = 8_192  # of a step
    max_num_seqs: int = 256  # at once

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"expected max_num_seqs >= 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"expected max_num_batched_tokens >= max_num_seqs = {self.max_num_seqs} (a token each), "
                f"got {self.max_num_batched_tokens}"
            )


@dataclass
class BatchedReplay:
    """One replica's run over the jobs that it gets."""

    arrivals: deque[Job]  # in order of their arrival; more may be appended while it runs
    manager: KVCacheManager
    prompts: PromptMaker
    recorder: Recorder
    clock: VirtualClock
    speed: SpeedModel
    batching: BatchingConfig
    on_end: Callable[[Job, float], object]  # called with jobs that have ended or are refused, and when
    external: ExternalKV | None = None
    on_handover: Callable[[Job], object] = lambda job: None  # called with jobs that end here and go on elsewhere

    def __post_init__(self) -> None:
        bounds = self.batching
        config = SchedulerConfig(bounds.max_num_seqs, bounds.max_num_batched_tokens, self.manager.max_model_len)
        connector = None if self.external is None else self.external.connector
        self.scheduler = Scheduler(self.manager, config, connector=connector)
        self._table = self.manager.request_table
        self._backlog: deque[Job] = deque()  # have arrived, and the scheduler does not know them
        self._jobs: dict[str, Job] = {}  # by request, those that the scheduler knows
        self._num_scheduled = self._num_emitted = 0
        self._waits_for_external = False  # nothing else can go on

    @property
    def next_step_s(self) -> float:
        """When the next step begins, unless a job comes before; infinite: nothing waits, loads or runs."""
        is_waiting = bool(self._backlog or self.scheduler.num_waiting)
        if self.scheduler.num_running or (is_waiting and not self._waits_for_external):
            return self.clock.now_s
        next_s = self.arrivals[0].arrives_s if self.arrivals else math.inf
        if self.scheduler.num_loading and self.external is not None:
            next_s = min(next_s, self.external.next_arrival_s)
        return max(self.clock.now_s, next_s)

    @property
    def queued(self) -> Iterator[Job]:
        """Jobs that have no blocks now."""
        yield from self.arrivals
        yield from self._backlog
        for request in self.scheduler.waiting:
            yield self._jobs[request.request_id]

    @property
    def seated_rows(self) -> np.ndarray:  # int64[n]
        """Rows in the manager's table of the requests that have blocks: those that run, and those that load."""
        running = np.flatnonzero(self.scheduler.running_rows.is_running)
        return np.append(running, [one.request.row for one in self.scheduler.loading]).astype(np.int64)

    def step(self) -> None:
        """Lets jobs arrive and runs one step, at `next_step_s`."""
        self.clock.now_s = self.next_step_s
        while self.arrivals and self.arrivals[0].arrives_s <= self.clock.now_s:
            self._backlog.append(self.arrivals.popleft())
        while self._backlog and self.scheduler.num_waiting < self.batching.max_num_seqs:  # as many as a step may admit
            self._queue(self._backlog.popleft())
        start = thread_time_ns()
        step = self._schedule()
        host_ns = thread_time_ns() - start
        self._waits_for_external = step is None and self.scheduler.num_loading > 0
        if step is not None:
            self._run(step, host_ns)

    def _queue(self, job: Job) -> None:
        """Gives a job to the scheduler, or refuses it."""
        if job.request is None:
            job.request = self.prompts.make(str(job.index), job.source)
        request_id, num_tokens = job.request.request_id, job.request.num_prompt_tokens
        engine_request = EngineRequest(
            job.request,
            SamplingParams(max_tokens=job.max_tokens),
            seed=0,
            stop_token_ids=frozenset(),
            arrival=self._num_scheduled,
            stats=RequestStats(request_id, num_tokens, job.asked_s),
        )
        try:
            self.scheduler.add(engine_request)
        except ValueError:
            self.recorder.count_refusal()
            self.on_end(job, self.clock.now_s)
        else:
            self._jobs[request_id] = job
            self._num_scheduled += 1

    def _schedule(self) -> ScheduledStep | None:
        """The next step, its tokens counted as computed; loads that have arrived go on before, new ones begin."""
        if self.external is not None:
            self.scheduler.end_loads(*self.external.step_starts())
        step = self.scheduler.schedule()
        if self.external is not None:
            self.external.step_is_planned()
        return step

    def _run(self, step: ScheduledStep, host_ns: int) -> None:
        """Lets a step's time pass, and gives its requests their tokens."""
        for engine_request in step.admitted:
            self._count_admission(engine_request)
        self._pass_time(step)
        rows = step.rows[step.samples]
        self._num_emitted += rows.size
        token_ids = (np.arange(self._num_emitted - rows.size, self._num_emitted) & MAX_TOKEN_ID).astype(np.int32)
        num_outputs = self._table.num_tokens[rows] - self._table.num_prompt_tokens[rows]
        start = thread_time_ns()
        self.scheduler.start(step)
        new = self.scheduler.update(step, token_ids, np.zeros(rows.size, np.float32))
        host_ns += thread_time_ns() - start
        for place in np.flatnonzero(num_outputs < 2).tolist():
            self._note_time(self._jobs[new.request_ids[place]], is_first=not num_outputs[place])
        self.recorder.output_tokens += rows.size
        for ended in sorted([new.requests[place] for place in new.ended], key=lambda one: one.arrival):
            self._end(self._jobs.pop(ended.request_id))
        self.recorder.host_ns.append(host_ns)
        self.recorder.preemptions = self.scheduler.num_preemptions
        num_waiting = len(self._backlog) + self.scheduler.num_waiting
        self.recorder.sample(self.clock.now_s, self.scheduler.num_running, num_waiting)

    def _count_admission(self, engine_request: EngineRequest) -> None:
        """Counts what a request that runs for the first time did not have to compute."""
        request_id, num_found = engine_request.request_id, engine_request.stats.num_cached_tokens
        job = self._jobs[request_id]
        if not job.was_admitted and num_found is not None:
            job.was_admitted = True
            num_sent = 0 if self.external is None else self.external.num_sent_tokens(request_id)
            self.recorder.count_admission(job.source.input_length, num_found - num_sent, job.infinite_hit)

    def _pass_time(self, step: ScheduledStep) -> None:
        computed = self._table.num_computed_tokens[step.rows]
        decoding = computed >= self._table.num_prompt_tokens[step.rows]
        num_decodes = int(np.count_nonzero(decoding))
        kv_tokens = int(computed[decoding].sum()) + num_decodes
        num_tokens = int(step.num_new_tokens.sum())
        self.recorder.computed_tokens += num_tokens
        seconds = self.speed.step_seconds(num_tokens - num_decodes, num_decodes, kv_tokens)
        self.recorder.busy_s += seconds
        self.clock.now_s += seconds

    def _note_time(self, job: Job, *, is_first: bool) -> None:
        """The first or second token of a job is there; of one without output its prompt."""
        if is_first:
            job.first_token_s = self.clock.now_s
            self.recorder.ttft_s.append(self._waited_s(job))
        else:
            self.recorder.second_token_s.append(self._waited_s(job))

    def _end(self, job: Job) -> None:
        """The job has all tokens that it gets here."""
        if job.goes_on:
            self.on_handover(job)
            return
        self.recorder.output_tokens -= not job.source.output_length  # nobody asked for the one token
        if job.source.output_length > 1:
            decoding_s = self.clock.now_s - job.first_token_s
            self.recorder.token_gap_s.append(decoding_s / (job.source.output_length - 1))
        self.recorder.latency_s.append(self._waited_s(job))
        self.on_end(job, self.clock.now_s)

    def _waited_s(self, job: Job) -> float:
        """Virtual seconds since the request arrived in the deployment."""
        return self.clock.now_s - job.asked_s

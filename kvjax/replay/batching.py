"""Replay of continuous batching in virtual time: token budget, chunked prefill, preemption, no model.

Flow:    Jobs -> [BatchedReplay.step] -> KVCacheManager calls, SpeedModel -> Recorder; Jobs that others go on with

A step, as the reference engine and vLLM's scheduler take it:

    1. running requests in order of arrival: one token where decoding, else the next chunk of the prompt, while the
       budget lasts; all in one `plan_step`. A request that does not fit makes the youngest that has blocks start over,
       be it that they are still being filled.
    2. if nothing was preempted: waiting requests in order of arrival, each after a lookup, while budget and seats last
       and the whole of what is known of the request fits. Blocks of what tiers or another replica have of it are filled
       first, beside steps (`ExternalKV`)
    3. time passes as the speed model says; every request whose tokens are all computed gets one more

Outputs are tokens that no prompt has, so they never hit; blocks that they fill are hashed and registered all the same.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import thread_time_ns
from typing import Protocol

import numpy as np

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.requests.request import Request
from kvjax.core.requests.token_ids import MAX_TOKEN_ID
from kvjax.replay.clock import VirtualClock
from kvjax.replay.external_kv import ExternalKV
from kvjax.replay.recorder import Recorder
from kvjax.replay.running_batch import Job, RunningBatch
from kvjax.replay.speed_model import SpeedModel
from kvjax.replay.trace import TraceRequest


@dataclass(frozen=True)
class BatchingConfig:
    """Bounds of a step."""

    max_num_batched_tokens: int = field(default=8_192, metadata={"doc": "token budget of a step"})
    max_num_seqs: int = field(default=256, metadata={"doc": "requests that run at once"})

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"expected max_num_seqs >= 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"expected max_num_batched_tokens >= max_num_seqs = {self.max_num_seqs} (a token each), "
                f"got {self.max_num_batched_tokens}"
            )


class PromptSource(Protocol):
    """What makes a request of a trace; `PromptMaker`."""

    def make(self, request_id: str, source: TraceRequest) -> Request:
        """The request, not yet known to any manager; called once for each."""


@dataclass
class BatchedReplay:
    """One replica's run over the jobs that it gets."""

    arrivals: deque[Job]  # in order of their arrival; more may be appended while it runs
    manager: KVCacheManager
    prompts: PromptSource
    recorder: Recorder
    clock: VirtualClock
    speed: SpeedModel
    batching: BatchingConfig
    on_end: Callable[[Job, float], object]  # called with jobs that have ended or are refused, and when
    external: ExternalKV | None = None
    on_handover: Callable[[Job], object] = lambda job: None  # called with jobs that end here and go on elsewhere

    def __post_init__(self) -> None:
        self._table = self.manager.request_table
        self._waiting: deque[Job] = deque()
        self._running = RunningBatch()
        self._loading: dict[str, Job] = {}
        self._num_arrived = self._num_emitted = 0
        self._waits_for_external = False  # nothing else can go on

    @property
    def next_step_s(self) -> float:
        """When the next step begins, unless a job comes before; infinite: nothing waits, loads or runs."""
        if self._running or (self._waiting and not self._waits_for_external):
            return self.clock.now_s
        return max(self.clock.now_s, self._next_s())

    @property
    def queued(self) -> Iterator[Job]:
        """Jobs that have no blocks yet."""
        yield from self.arrivals
        yield from self._waiting

    @property
    def seated_rows(self) -> np.ndarray:  # int64[n]
        """Rows in the manager's table of the requests that have blocks: those that run, and those that load."""
        loading = [_made(job).row for job in self._loading.values()]
        return np.concatenate((self._running.rows, np.array(loading, np.int64))) if loading else self._running.rows

    def step(self) -> None:
        """Lets jobs arrive and runs one step, at `next_step_s`."""
        self.clock.now_s = self.next_step_s
        self._waits_for_external = False
        while self.arrivals and self.arrivals[0].arrives_s <= self.clock.now_s:
            job = self.arrivals.popleft()
            job.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
            self._waiting.append(job)
        self._step()

    def _next_s(self) -> float:
        """When the next job arrives, or has its blocks."""
        next_s = self.arrivals[0].arrives_s if self.arrivals else math.inf
        if self._loading and self.external is not None:
            next_s = min(next_s, self.external.next_arrival_s)
        return next_s

    def _step(self) -> None:
        start = thread_time_ns()
        self.manager.new_step_starts()
        if self.external is not None:
            self._run_loaded(self.external)
        rows, num_new, preempted = self._schedule_running()
        host_ns = thread_time_ns() - start
        if not preempted:
            budget = self.batching.max_num_batched_tokens - int(num_new.sum())
            admitted, admitted_new, spent_ns = self._admit(budget)
            rows, num_new = np.concatenate((rows, admitted)), np.concatenate((num_new, admitted_new))
            host_ns += spent_ns
        if self.external is not None:
            self.external.step_is_planned()
        if not len(rows):
            self._waits_for_external = bool(self._loading)
            return  # all that was tried is refused or preempted; the next step starts from there
        self._pass_time(rows, num_new)
        start = thread_time_ns()
        self._finish_step(rows, num_new)
        self.recorder.host_ns.append(host_ns + thread_time_ns() - start)
        self.recorder.sample(self.clock.now_s, len(self._running), len(self._waiting))

    # -- 1. running requests ------------------------------------------------------------------------------------------

    def _schedule_running(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """Rows that got tokens, how many each (int64), and whether a request had to be preempted."""
        rows = self._running.rows
        pending = self._table.num_tokens[rows] - self._table.num_computed_tokens[rows]
        before = np.cumsum(pending) - pending
        num_new = np.clip(self.batching.max_num_batched_tokens - before, 0, pending)
        if self.manager.groups.state_steps:
            self._limit_steps(rows, num_new)
        rows, num_new = rows[num_new > 0], num_new[num_new > 0]
        planned, preempted = 0, False
        while planned < len(rows):
            planned += self.manager.plan_step(rows[planned:], num_new[planned:]).num_planned
            if planned < len(rows):
                preempted = True
                if self._preempt_youngest() == rows[-1]:
                    rows, num_new = rows[:-1], num_new[:-1]
        return rows, num_new, preempted

    def _limit_steps(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        """Ends prompts' steps where recurrent layers cache their states."""
        for i in np.flatnonzero(num_new > 1).tolist():
            num_new[i] = self.manager.limit_step(self._table.requests[rows[i]], int(num_new[i]))

    def _preempt_youngest(self) -> int:
        """Makes the youngest request that runs or loads wait again, with nothing computed; its row."""
        job = max((*self._running.jobs[-1:], *self._loading.values()), key=lambda one: one.arrival)
        request = _made(job)
        row = request.row
        if self.external is not None and self._loading.pop(request.request_id, None) is not None:
            self.external.cancel(request)
        else:
            self._running.pop_youngest()
        self.recorder.preemptions += 1
        if self._num_seated:
            self._wait_again(job)
        else:
            self.manager.free(request)
            self._refuse(job, was_admitted=True)  # it had the pool to itself
        return row

    def _wait_again(self, job: Job) -> None:
        """A job gives its blocks up, and waits before those that came later."""
        request = _made(job)
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        insort(self._waiting, job, key=lambda one: one.arrival)

    # -- 2. waiting requests ------------------------------------------------------------------------------------------

    def _admit(self, budget: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows admitted, their tokens, and the host nanoseconds spent, making prompts not counted."""
        jobs: list[Job] = []
        num_new: list[int] = []
        host_ns = 0
        while self._waiting and budget > 0 and self._num_seated + len(jobs) < self.batching.max_num_seqs:
            job = self._waiting[0]
            if job.request is None:
                job.request = self.prompts.make(str(job.index), job.source)
            start = thread_time_ns()
            tokens = self._try_to_admit(job, job.request, budget)
            host_ns += thread_time_ns() - start
            if tokens is None and (self._running or jobs or self._loading):
                break
            self._waiting.popleft()
            if tokens == 0:
                continue
            if tokens is None:
                self._refuse(job, job.was_admitted)  # the pool is empty but for it
                continue
            jobs.append(job)
            num_new.append(tokens)
            budget -= tokens
        rows = np.array([_made(job).row for job in jobs], np.int64)
        if jobs:
            self._running.extend(jobs, rows)
        return rows, np.array(num_new, np.int64), host_ns

    def _try_to_admit(self, job: Job, request: Request, budget: int) -> int | None:
        """New tokens of the request's first step, 0 where it is loaded first, or None where it does not fit now."""
        blocks, hit = self.manager.get_computed_blocks(request)
        if self.external is not None:
            num_loaded = self.external.start(self.manager, request, blocks, hit)
            if num_loaded is None:
                return None
            if num_loaded:
                self._loading[request.request_id] = job
                self._count_admission(job, hit + num_loaded * self.external.is_hit)
                return 0
        num_new = self.manager.limit_step(request, min(request.num_tokens - hit, budget), hit, blocks)
        if not num_new:
            return None
        allocated = self.manager.allocate_slots(request, num_new, hit, blocks, full_sequence_must_fit=True)
        if allocated is None:
            return None
        request.num_computed_tokens = hit
        self._count_admission(job, hit)
        return num_new

    def _count_admission(self, job: Job, hit: int) -> None:
        """Counts what the first lookup found that the job got blocks for, be it that the load fails."""
        if not job.was_admitted:
            job.was_admitted = True
            self.recorder.count_admission(job.source.input_length, hit, job.infinite_hit)

    @property
    def _num_seated(self) -> int:
        return len(self._running) + len(self._loading)

    def _run_loaded(self, external: ExternalKV) -> None:
        """Requests whose blocks have arrived run; those whose load failed wait again, and will be computed."""
        results = external.step_starts()
        for request_id in results.failed:
            self._wait_again(self._loading.pop(request_id))
        for request_id in results.loaded:
            job = self._loading.pop(request_id)
            request = _made(job)
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self._running.extend([job], np.array([request.row], np.int64))

    def _refuse(self, job: Job, was_admitted: bool) -> None:
        self.recorder.count_refusal(was_admitted)
        self.on_end(job, self.clock.now_s)

    # -- 3. time and tokens -------------------------------------------------------------------------------------------

    def _pass_time(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        computed = self._table.num_computed_tokens[rows]
        decoding = computed >= self._table.num_prompt_tokens[rows]
        num_decodes = int(np.count_nonzero(decoding))
        kv_tokens = int(computed[decoding].sum()) + num_decodes
        num_tokens = int(num_new.sum())
        self.recorder.computed_tokens += num_tokens
        seconds = self.speed.step_seconds(num_tokens - num_decodes, num_decodes, kv_tokens)
        self.recorder.busy_s += seconds
        self.clock.now_s += seconds

    def _finish_step(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        """Counts the tokens as computed, emits one for every request that has none left, frees what is finished."""
        self._table.advance(rows, num_new)
        running = self._running
        done = self._table.num_tokens[running.rows] == self._table.num_computed_tokens[running.rows]
        emitting = done & (running.outputs_left > 0)
        num_emitted = int(np.count_nonzero(emitting))
        if num_emitted:
            tokens = (self._num_emitted + np.arange(num_emitted)) & MAX_TOKEN_ID
            self._table.append_tokens(running.rows[emitting], tokens)
            self._num_emitted += num_emitted
            running.outputs_left[emitting] -= 1
        for i in np.flatnonzero(done & (running.num_timed < 2)).tolist():
            self._note_time(running.jobs[i], is_first=not running.num_timed[i])
            running.num_timed[i] += 1
        for job in running.take_out(done & (running.outputs_left == 0)):
            self.manager.free(_made(job))
            self._end(job)
        self.recorder.output_tokens += num_emitted

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
        if job.source.output_length > 1:
            decoding_s = self.clock.now_s - job.first_token_s
            self.recorder.token_gap_s.append(decoding_s / (job.source.output_length - 1))
        self.recorder.latency_s.append(self._waited_s(job))
        self.on_end(job, self.clock.now_s)

    def _waited_s(self, job: Job) -> float:
        """Virtual seconds since the request arrived in the deployment."""
        return self.clock.now_s - job.asked_s


def _made(job: Job) -> Request:
    assert job.request is not None  # it has been admitted
    return job.request

"""Replay of continuous batching in virtual time: token budget, chunked prefill, preemption, no model.

Flow:    trace -> [BatchedReplay.run] -> KVCacheManager calls, SpeedModel -> Recorder

A step, as the reference engine and vLLM's scheduler take it:

    1. running requests in order of admission: one token where decoding, else the next chunk of the prompt, while the
       budget lasts; all in one `plan_step`. A request that does not fit makes the youngest running one start over.
    2. if nothing was preempted: waiting requests in order of arrival, each after a lookup, while budget and seats last
       and the whole of what is known of the request fits
    3. time passes as the speed model says; every request whose tokens are all computed gets one more

Outputs are tokens that no prompt has, so they never hit; blocks that they fill are hashed and registered all the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time_ns
from typing import Protocol

import numpy as np

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.requests.request import Request
from kvjax.core.requests.token_ids import MAX_TOKEN_ID
from kvjax.replay.clock import VirtualClock
from kvjax.replay.recorder import Recorder
from kvjax.replay.running_batch import Job, RunningBatch
from kvjax.replay.speed_model import SpeedModel
from kvjax.replay.tiers import ReplayTiers
from kvjax.replay.trace import TraceRequest


@dataclass(frozen=True)
class BatchingConfig:
    """Bounds of a step."""

    max_num_batched_tokens: int = 8_192
    max_num_seqs: int = 256

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


class HitCeiling(Protocol):
    """What a request could hit at most; `InfiniteCache`."""

    def lookup_and_add(self, request: TraceRequest) -> int:
        """Hit tokens of a request that arrives; called once for each, in order."""


@dataclass
class BatchedReplay:
    """One run over one trace."""

    trace: Sequence[TraceRequest]
    manager: KVCacheManager
    prompts: PromptSource
    infinite: HitCeiling
    recorder: Recorder
    clock: VirtualClock
    speed: SpeedModel
    batching: BatchingConfig
    on_progress: Callable[[int], object]
    should_stop: Callable[[], bool] = lambda: False  # asked before every step
    tiers: ReplayTiers | None = None

    def __post_init__(self) -> None:
        self._table = self.manager.request_table
        self._waiting: deque[Job] = deque()
        self._running = RunningBatch()
        self._loading: dict[str, Job] = {}
        self._num_arrived = 0
        self._num_emitted = 0

    def run(self) -> None:
        """Replays the whole trace, or as far as it is not to stop."""
        while self.has_work and not self.should_stop():
            self.step()

    @property
    def has_work(self) -> bool:
        """Whether a request is yet to arrive, waits, loads or runs."""
        return bool(self._num_arrived < len(self.trace) or self._waiting or self._loading or self._running)

    @property
    def waiting(self) -> Sequence[Job]:
        """Requests that have arrived and do not run."""
        return self._waiting

    @property
    def running_rows(self) -> np.ndarray:  # int64[n]
        """Rows of the running requests in the manager's table."""
        return self._running.rows

    def step(self) -> None:
        """Lets requests arrive and runs one step; where nothing waits or runs, time passes until the next arrives."""
        if not self._waiting and not self._running:
            self.clock.now_s = max(self.clock.now_s, self._next_s())
        self._arrive()
        self._step()

    def _next_s(self) -> float:
        """When the next request arrives, or has its blocks."""
        arrives_s = math.inf
        if self._num_arrived < len(self.trace):
            arrives_s = self.trace[self._num_arrived].timestamp_ms / 1e3
        if self._loading and self.tiers is not None:
            arrives_s = min(arrives_s, self.tiers.worker.next_load_s)
        return arrives_s

    def _arrive(self) -> None:
        while self._num_arrived < len(self.trace):
            source = self.trace[self._num_arrived]
            if source.timestamp_ms / 1e3 > self.clock.now_s:
                break
            hit = self.infinite.lookup_and_add(source)
            self._waiting.append(Job(self._num_arrived, source, hit, source.output_length))
            self._num_arrived += 1

    def _step(self) -> None:
        start = thread_time_ns()
        self.manager.new_step_starts()
        if self.tiers is not None:
            self._run_loaded(self.tiers)
        rows, num_new, preempted = self._schedule_running()
        host_ns = thread_time_ns() - start
        if not preempted:
            budget = self.batching.max_num_batched_tokens - int(num_new.sum())
            admitted, admitted_new, spent_ns = self._admit(budget)
            rows, num_new = np.concatenate((rows, admitted)), np.concatenate((num_new, admitted_new))
            host_ns += spent_ns
        if self.tiers is not None:
            self.tiers.step_is_planned()
            if not len(rows) and self._loading:
                self.clock.now_s = max(self.clock.now_s, self._next_s())
        if not len(rows):
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
        """Makes the youngest running request wait again, with nothing computed; its row."""
        job, row = self._running.pop_youngest()
        request = _made(job)
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.recorder.preemptions += 1
        if self._running:
            self._waiting.appendleft(job)
        else:
            self._refuse(was_admitted=True)  # it had the pool to itself
        return row

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
                self._refuse(job.request.num_preemptions > 0)  # the pool is empty but for it
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
        if self.tiers is not None and (external := self.tiers.start(self.manager, request, blocks, hit)) != 0:
            if external is None:
                return None
            self._loading[request.request_id] = job
            if not request.num_preemptions:
                self.recorder.count_admission(job.source.input_length, hit + external, job.infinite_hit)
            return 0
        num_new = self.manager.limit_step(request, min(request.num_tokens - hit, budget), hit, blocks)
        if not num_new:
            return None
        allocated = self.manager.allocate_slots(request, num_new, hit, blocks, full_sequence_must_fit=True)
        if allocated is None:
            return None
        request.num_computed_tokens = hit
        if not request.num_preemptions:
            self.recorder.count_admission(job.source.input_length, hit, job.infinite_hit)
        return num_new

    @property
    def _num_seated(self) -> int:
        return len(self._running) + len(self._loading)

    def _run_loaded(self, tiers: ReplayTiers) -> None:
        """Requests whose blocks have arrived run."""
        for request_id in tiers.step_starts().loaded:
            job = self._loading.pop(request_id)
            request = _made(job)
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self._running.extend([job], np.array([request.row], np.int64))

    def _refuse(self, was_admitted: bool) -> None:
        self.recorder.count_refusal(was_admitted)
        self.on_progress(1)

    # -- 3. time and tokens -------------------------------------------------------------------------------------------

    def _pass_time(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        computed = self._table.num_computed_tokens[rows]
        decoding = computed >= self._table.num_prompt_tokens[rows]
        num_decodes = int(np.count_nonzero(decoding))
        kv_tokens = int(computed[decoding].sum()) + num_decodes
        num_tokens = int(num_new.sum())
        self.recorder.computed_tokens += num_tokens
        self.clock.now_s += self.speed.step_seconds(num_tokens - num_decodes, num_decodes, kv_tokens)

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
        for i in np.flatnonzero(done & ~running.has_started).tolist():
            self.recorder.ttft_s.append(self._waited_s(running.jobs[i]))
        running.has_started |= done
        for job in running.take_out(done & (running.outputs_left == 0)):
            self.manager.free(_made(job))
            self.recorder.latency_s.append(self._waited_s(job))
            self.on_progress(1)
        self.recorder.output_tokens += num_emitted

    def _waited_s(self, job: Job) -> float:
        """Virtual seconds since the request arrived."""
        return self.clock.now_s - job.source.timestamp_ms / 1e3


def _made(job: Job) -> Request:
    assert job.request is not None  # it has been admitted
    return job.request

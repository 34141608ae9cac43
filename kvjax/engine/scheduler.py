"""Which requests take part in the next step, and with how many tokens: first come, first served.

Flow:    EngineRequest -> [Scheduler.schedule] -> ScheduledStep -> model -> [Scheduler.update] -> finished requests
Source:  vLLM v1/core/sched/scheduler.py (running first, preemption by recomputation, watermark); all running
         requests in one call: ARCHITECTURE.md, "Planning a step"

A step takes at most `max_num_batched_tokens` tokens. Running requests come first, in order of priority, a token or a
chunk of prompt each; then waiting requests are admitted while tokens, rows and blocks last. When blocks run out, the
running request of the lowest priority is preempted: it gives back its blocks, waits at the head of the queue, and on
readmission computes again what the prefix cache no longer holds.

Samples of one prompt wait in a row. The first computes the prompt; once that step is dispatched, as many of the others
as there are rows for are forked from it: they share its blocks of all prompt tokens but the last, which each computes
for itself, to draw its own first token. The rest are admitted like other requests.

Invariants (`check_invariants`):

    I1  priorities rise through `running`, then `waiting`: preemption moves the last of one to the front of the other
    I2  a running request owns a row, a waiting one does not
    I3  a request is in one of the two queues, once
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvjax.core import KVCacheBlocks, KVCacheManager, Request
from kvjax.engine.engine_request import EngineRequest, FinishReason, RequestStatus
from kvjax.errors import InvariantError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step. `watermark` is the share of each pool that admissions leave free beside running requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = 0.0
    max_steps_in_flight: int = 1  # steps that may be scheduled before the first of them is read


@dataclass(frozen=True)
class ScheduledStep:
    """One step, and what it took to schedule it. Requests with one new token come first, as in a `StepPlan`."""

    requests: tuple[EngineRequest, ...]  # S
    rows: np.ndarray  # int64[S]
    num_new_tokens: np.ndarray  # int64[S] >= 1
    samples: np.ndarray  # bool[S] whether the request's last token is computed here, so that the next is sampled
    token_source: np.ndarray  # int32[S] -1: the host knows the tokens, else the index of the one sampled a step before
    admitted: tuple[EngineRequest, ...]
    num_preemptions: int
    num_queried_tokens: int  # tokens of the requests admitted in this step
    num_hit_tokens: int  # those of them that the prefix cache held
    num_released: tuple[int, ...]  # per pool: blocks that running requests gave back


@dataclass(frozen=True)
class NewToken:
    """A token that a request got, and why the request ends with it, if it does."""

    request: EngineRequest
    token_id: int
    logprob: float
    finish_reason: FinishReason | None


@dataclass
class _Draft:
    """A step while it is being scheduled."""

    budget: int  # tokens left
    requests: list[EngineRequest] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)  # int64[...] each
    num_new_tokens: list[np.ndarray] = field(default_factory=list)  # int64[...] each
    admitted: list[EngineRequest] = field(default_factory=list)
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    def take(self, requests: list[EngineRequest], rows: np.ndarray, num_new_tokens: np.ndarray) -> None:
        self.requests += requests
        self.rows.append(rows)
        self.num_new_tokens.append(num_new_tokens)
        self.budget -= int(num_new_tokens.sum())


class Scheduler:
    """FCFS queues over one manager; owned by the engine's thread. A step costs a few numpy calls plus admissions.

    A step goes `schedule` (blocks are allocated), `start` (its tokens count as computed), `update` (its sampled tokens
    are known). With `max_steps_in_flight` 2 the next step may be scheduled before `update`.
    """

    def __init__(self, manager: KVCacheManager, config: SchedulerConfig) -> None:
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self._manager = manager
        self._table = manager.request_table
        self._config = config
        self._watermarks = [int(config.watermark * pool.num_blocks) for pool in manager.kv_cache_config.pools]
        self._by_row = _RowState()
        self._num_preempted = 0  # since the last step was scheduled

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def add(self, request: EngineRequest) -> None:
        """Queues a request behind all others.

        Raises:
            ValueError: it can never run: longer than `max_model_len`, or than a pool holds. Nothing is changed.
        """
        self.check_fits(request)
        self.waiting.append(request)

    def check_fits(self, request: EngineRequest) -> None:
        """Raises ValueError if the request can never run, as `add` would."""
        num_tokens, limit = request.max_total_tokens, self._config.max_model_len
        if num_tokens > limit:
            raise ValueError(
                f"request {request.request_id}: expected prompt and max_tokens of at most {limit} tokens "
                f"(max_model_len), got {request.request.num_prompt_tokens} + {request.params.max_tokens}"
            )
        config = self._manager.kv_cache_config
        in_flight = self._config.max_num_batched_tokens * self._config.max_steps_in_flight
        for pool_id, pool in enumerate(config.pools):
            needed = sum(
                group.kv_cache_spec.max_blocks_per_request(num_tokens, in_flight)
                for group in config.kv_cache_groups
                if group.pool_id == pool_id
            )
            if needed > pool.num_blocks - 1:
                raise ValueError(
                    f"request {request.request_id}: {num_tokens} tokens need {needed} blocks of pool {pool_id}, which "
                    f"has {pool.num_blocks - 1} beside the null block; give the pool more blocks or the request fewer "
                    "tokens"
                )

    def abort(self, request: EngineRequest) -> None:
        """Ends a request where it stands. A step in flight that names it is read as usual; its token is dropped."""
        self._finish(request, FinishReason.ABORT)

    def preempt_last(self) -> None:
        """The running request of the lowest priority gives back all it has and waits at the head of the queue.

        The next step admits nobody.

        Raises:
            ValueError: nothing runs.
        """
        if not self.running:
            raise ValueError("expected a running request to preempt, got none")
        engine_request = self.running.pop()
        self._stop_running(engine_request)
        engine_request.request.num_computed_tokens = 0
        engine_request.request.num_preemptions += 1
        engine_request.stats.num_preemptions += 1
        engine_request.status = RequestStatus.WAITING
        self.waiting.appendleft(engine_request)
        self._num_preempted += 1

    def schedule(self) -> ScheduledStep | None:
        """Allocates blocks for the next step; None: nothing can run now."""
        self._manager.new_step_starts()
        draft = _Draft(self._config.max_num_batched_tokens)
        num_released = self._schedule_running(draft)
        num_preemptions, self._num_preempted = self._num_preempted, 0
        if not num_preemptions:  # nor could a request come back before its token in flight is read
            self._admit(draft)
        if not draft.requests:
            return None
        rows, num_new_tokens = np.concatenate(draft.rows), np.concatenate(draft.num_new_tokens)
        order = np.argsort(num_new_tokens != 1, kind="stable")
        rows, num_new_tokens = rows[order], num_new_tokens[order]
        is_pending = self._by_row.num_pending[rows] > 0
        return ScheduledStep(
            requests=tuple(draft.requests[i] for i in order),
            rows=rows,
            num_new_tokens=num_new_tokens,
            samples=num_new_tokens == self._num_left(rows),
            token_source=np.where(is_pending, self._by_row.sample_index[rows], -1).astype(np.int32),
            admitted=tuple(draft.admitted),
            num_preemptions=num_preemptions,
            num_queried_tokens=draft.num_queried_tokens,
            num_hit_tokens=draft.num_hit_tokens,
            num_released=num_released,
        )

    def start(self, step: ScheduledStep) -> list[EngineRequest]:
        """Counts the step's tokens as computed: it is dispatched, and steps run in order.

        Returns:
            The samples that run from now on, as the step has computed their prompts.
        """
        self._table.advance(step.rows, step.num_new_tokens)
        sampling = step.rows[step.samples]
        self._by_row.num_in_flight[step.rows] += step.num_new_tokens
        self._by_row.num_pending[sampling] += 1
        self._by_row.sample_index[sampling] = np.arange(sampling.size)
        return self._fork_samples()

    def update(
        self,
        step: ScheduledStep,
        token_ids: np.ndarray,  # int32[number of true `samples`] in their order
        logprobs: np.ndarray,  # float32[likewise]
    ) -> list[NewToken]:
        """Gives the sampled tokens to their requests and ends those that are done; steps are updated in order.

        A token of a request that ended or was aborted while the step was in flight is dropped.
        """
        self._by_row.num_in_flight[step.rows] -= step.num_new_tokens
        self._by_row.num_pending[step.rows[step.samples]] -= 1
        sampled = [step.requests[i] for i in np.flatnonzero(step.samples)]
        is_running = np.array([request.status is RequestStatus.RUNNING for request in sampled], bool)
        rows = np.array([request.request.row for request in sampled], np.int64)
        self._table.append_tokens(rows[is_running], token_ids[is_running])
        new_tokens = []
        for request, token_id, logprob in zip(sampled, token_ids.tolist(), logprobs.tolist(), strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            if request.status is RequestStatus.WAITING:  # preempted while its step was in flight
                request.request.append_output_token_ids(token_id)
            request.logprobs.append(logprob)
            reason = request.finish_reason_after(token_id, len(request.logprobs))
            new_tokens.append(NewToken(request, token_id, logprob, reason))
            if reason is not None:
                self._finish(request, reason)
        return new_tokens

    def check_invariants(self) -> None:
        """Checks I1 to I3.

        Raises:
            InvariantError: one does not hold.
        """
        queued = [*self.running, *self.waiting]
        priorities = [request.priority for request in queued]
        if priorities != sorted(set(priorities)):
            raise InvariantError(f"I1, I3: expected rising priorities, got {priorities}")
        for i, request in enumerate(queued):
            expected = RequestStatus.RUNNING if i < len(self.running) else RequestStatus.WAITING
            row = request.request.row
            if request.status is not expected or (row >= 0) != (expected is RequestStatus.RUNNING):
                raise InvariantError(
                    f"I2: {request.request_id} is queued as {expected.value} and is {request.status.value}, row {row}"
                )

    def _schedule_running(self, draft: _Draft) -> tuple[int, ...]:
        """Plans the running requests in order, preempting from the end while one does not fit; blocks given back."""
        pools = self._manager.block_pools
        num_released = [-pool.num_free_blocks for pool in pools]
        start = 0  # running requests before it are planned, or have nothing to do
        while start < len(self.running) and draft.budget:
            rows = np.array([request.request.row for request in self.running[start:]], np.int64)
            num_new_tokens = _share(self._num_left(rows), draft.budget)
            active = np.flatnonzero(num_new_tokens)
            rows, num_new_tokens = rows[active], num_new_tokens[active]
            num_in_flight = self._by_row.num_in_flight[rows]
            result = self._manager.plan_step(rows, num_new_tokens, num_in_flight_tokens=num_in_flight)
            for group, update in zip(self._manager.kv_cache_config.kv_cache_groups, result.new_blocks, strict=True):
                num_released[group.pool_id] += update.block_ids.size
            planned = active[: result.num_planned]
            draft.take(
                [self.running[start + i] for i in planned],
                rows[: result.num_planned],
                num_new_tokens[: result.num_planned],
            )
            if planned.size == active.size:
                start = len(self.running)
            else:
                start += int(active[planned.size])
                for pool_id, pool in enumerate(pools):  # what the preemption frees is no release
                    num_released[pool_id] += pool.num_free_blocks
                self.preempt_last()
                for pool_id, pool in enumerate(pools):
                    num_released[pool_id] -= pool.num_free_blocks
        return tuple(released + pool.num_free_blocks for released, pool in zip(num_released, pools, strict=True))

    def _admit(self, draft: _Draft) -> None:
        """Admits waiting requests in order, until one does not fit."""
        while self.waiting and draft.budget and len(self.running) < self._config.max_num_seqs:
            engine_request = self.waiting[0]
            if engine_request.waits_for_first_sample:
                return
            request = engine_request.request
            blocks, num_hit = self._manager.get_computed_blocks(request)
            num_new_tokens = min(request.num_tokens - num_hit, draft.budget)
            if self.running and not self._leaves_watermark(request, blocks, num_hit):
                return
            allocated = self._manager.allocate_slots(
                request, num_new_tokens, num_hit, blocks, full_sequence_must_fit=True
            )
            if allocated is None:
                return
            self.waiting.popleft()
            request.num_computed_tokens = num_hit
            self._note_misses(engine_request)
            self._start_running(engine_request, num_hit)
            draft.take([engine_request], np.array([request.row]), np.array([num_new_tokens]))
            draft.admitted.append(engine_request)
            draft.num_queried_tokens += request.num_tokens
            draft.num_hit_tokens += num_hit

    def _note_misses(self, engine_request: EngineRequest) -> None:
        """Keeps what the last lookup found out of a request that is admitted for the first time."""
        reasons = self._manager.miss_reasons
        if reasons is not None and reasons.last is not None and engine_request.stats.num_cached_tokens is None:
            engine_request.stats.num_missed_tokens = reasons.last.num_missed_tokens

    def _fork_samples(self) -> list[EngineRequest]:
        """Starts the waiting samples whose first one has just computed the prompt, while there are rows."""
        forked: list[EngineRequest] = []
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            sample, first = self.waiting[0], self.waiting[0].first_sample
            if first is None or not first.is_at_its_prompts_end or first.request.num_prompt_tokens == 1:
                break
            children = self._manager.fork(first.request, 1, request_ids=[sample.request_id], num_in_flight_tokens=1)
            if children is None:
                break
            sample.request = children[0]
            if sample.stats.num_cached_tokens is None:
                sample.stats.num_shared_tokens = sample.request.num_computed_tokens
            self._start_running(self.waiting.popleft(), sample.request.num_computed_tokens)
            forked.append(sample)
        return forked

    def _start_running(self, engine_request: EngineRequest, num_hit_tokens: int) -> None:
        engine_request.status = RequestStatus.RUNNING
        self.running.append(engine_request)
        stats = engine_request.stats
        if stats.num_cached_tokens is None:
            stats.num_cached_tokens = num_hit_tokens
        stats.num_computed_tokens -= num_hit_tokens  # `_stop_running` adds all that the request had computed
        row = engine_request.request.row
        self._by_row.reserve(row)
        self._by_row.max_total_tokens[row] = engine_request.max_total_tokens

    def _stop_running(self, engine_request: EngineRequest) -> None:
        """Takes a running request's row and blocks. The caller removes it from `running`."""
        request = engine_request.request
        # Blocks that a token in flight filled could not be registered when they were planned.
        self._manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        engine_request.stats.num_computed_tokens += request.num_computed_tokens
        self._manager.free(request)

    def _finish(self, engine_request: EngineRequest, reason: FinishReason) -> None:
        if engine_request.status is RequestStatus.RUNNING:
            self.running.remove(engine_request)
            self._stop_running(engine_request)
        else:
            self.waiting.remove(engine_request)
        engine_request.status = RequestStatus.FINISHED
        engine_request.finish_reason = reason

    def _num_left(self, rows: np.ndarray) -> np.ndarray:  # int64[n]
        """Tokens that running requests still have to compute, those sampled but not read yet included."""
        num_tokens = self._table.num_tokens[rows] + self._by_row.num_pending[rows]
        has_all = num_tokens >= self._by_row.max_total_tokens[rows]  # its last token is sampled: only reading is left
        return np.where(has_all, 0, num_tokens - self._table.num_computed_tokens[rows])

    def _leaves_watermark(self, request: Request, hit: KVCacheBlocks, num_hit_tokens: int) -> bool:
        """Whether every pool keeps its watermark free after all of the request's tokens have their blocks."""
        return self._manager.can_admit(request, num_hit_tokens, hit, kept_free=self._watermarks)


class _RowState:
    """Arrays by row of the request table; rows grow by doubling."""

    def __init__(self) -> None:
        self.num_pending = np.zeros(16, np.int64)  # tokens sampled in steps that are not read yet
        self.num_in_flight = np.zeros(16, np.int64)  # tokens computed in those steps
        self.sample_index = np.zeros(16, np.int64)  # place of the newest pending token among its step's
        self.max_total_tokens = np.zeros(16, np.int64)

    def reserve(self, row: int) -> None:
        while row >= self.num_pending.size:
            for name, values in vars(self).items():
                setattr(self, name, np.concatenate([values, np.zeros_like(values)]))


def _share(num_tokens: np.ndarray, budget: int) -> np.ndarray:  # int64[n]
    """`num_tokens`, cut so that they sum to at most `budget`, first come first served."""
    before = np.cumsum(num_tokens) - num_tokens
    return np.clip(budget - before, 0, num_tokens)

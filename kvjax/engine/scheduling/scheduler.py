"""Which requests take part in the next step, and with how many tokens: the most urgent first.

Flow:    EngineRequest -> [Scheduler.schedule] -> ScheduledStep -> model -> [Scheduler.update] -> finished requests
Source:  vLLM v1/core/sched/scheduler.py (running first, preemption by recomputation, watermark); all running
         requests in one call: ARCHITECTURE.md, "Planning a step"

A step takes at most `max_num_batched_tokens` tokens. Running requests come first, the most urgent first, a token or a
chunk of prompt each; then waiting requests are admitted while tokens, rows and blocks last. When blocks run out, the
least urgent request that has any is preempted, whether it runs or loads. Its blocks are freed, and it waits before all
others of its priority. Once it is admitted again it computes what the prefix cache does not hold by then.

A request of lower `priority` is more urgent, and of equal priority the one that came first. Nobody is preempted for a
request that waits. Without priorities that is first come, first served.

Samples of one prompt wait one behind the other. The first computes the prompt. Once that step is dispatched, as many of
the others as there are rows for are forked from it. They share its blocks of all prompt tokens but the last; each
computes that one for itself, to draw its own first token. The rest are admitted like other requests. A recurrent state
holds all tokens before it, so in models with such states the first sample computes its last prompt token in a step of
its own, and the others are forked before that step.

Where groups are recurrent, a step takes of a prompt what ends where a block of states ends (`StepShares`).

With a drafter requests that decode take drafts besides (`DraftShares`), and get several tokens of one step. What comes
next depends on what is accepted, so such a request is in one step at a time. Prompts go on meanwhile. Where nothing but
decoding is left, the next step waits for all of them, so that they do not fall into groups that take turns.

Running requests are rows of the request table, kept in order of urgency in one array; what a step needs of them stands
in arrays too (`RunningRows`), so that Python looks at a request only when it starts, ends or waits.

Invariants (`check_invariants`):

    I1  urgency rises through `running`, and through `waiting`; a request that runs or loads is more urgent than every
        waiting one of its priority, and than every preempted one whose load did not fail
    I2  a running request owns a row, so does one that loads, a waiting one does not
    I3  a request is in one of the two queues, once
    I4  the arrays by row hold exactly the running requests
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvjax.core import KVCacheManager, StepsInFlight
from kvjax.core.step.step_builder import decode_first
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.outputs import FinishReason
from kvjax.engine.scheduling.admission import Admission
from kvjax.engine.scheduling.draft_shares import DraftShares
from kvjax.engine.scheduling.guarded_connector import GuardedConnector, LoadConnector
from kvjax.engine.scheduling.loading import LoadingRequests, LoadStart
from kvjax.engine.scheduling.running_inputs import RunningInputs
from kvjax.engine.scheduling.running_rows import RunningRows
from kvjax.engine.scheduling.scheduled_step import NewTokens, NextStep, ScheduledStep
from kvjax.engine.scheduling.speculation import Drafter
from kvjax.engine.scheduling.step_shares import StepShares
from kvjax.engine.scheduling.token_delivery import TokenDelivery
from kvjax.engine.scheduling.waiting_queue import WaitingQueue
from kvjax.errors import InvariantError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step. `watermark` is the share of each pool that admissions leave free beside running requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = 0.0
    max_steps_in_flight: int = 1  # steps that may be scheduled before the first of them is read
    num_drafts: int = 0  # most of one request in a step, with a drafter


class Scheduler:
    """Queues over one manager; owned by the engine's thread. A step costs a few numpy calls plus admissions.

    A step goes `schedule` (blocks are allocated), `start` (its tokens count as computed), `update` (its sampled tokens
    are known). With `max_steps_in_flight` 2 the next step may be scheduled before `update`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        inputs: RunningInputs | None = None,
        drafter: Drafter | None = None,
        connector: LoadConnector | None = None,  # brings KV from beyond the pools
    ) -> None:
        """A scheduler without requests.

        Raises:
            ValueError: steps are too small for the manager's recurrent groups.
        """
        self._shares = StepShares(manager, config.max_num_batched_tokens)
        self.inputs = RunningInputs() if inputs is None else inputs
        self.drafter = drafter
        self._waiting = WaitingQueue()
        self._rows = np.zeros(0, np.int64)  # of running requests, by urgency; replaced, never written
        self._columns_of = self._rows  # the rows of the newest step, with its requests and their ids
        self._columns = (np.zeros(0, np.object_), np.zeros(0, np.object_))
        self._by_row = RunningRows(manager.request_table.capacity)
        self._draft_shares = None if drafter is None else DraftShares(manager, self._by_row, drafter, config.num_drafts)
        self._delivery = TokenDelivery(manager, self._by_row, drafter, self._finish)
        self._flights = StepsInFlight(manager.request_table)  # started and not updated
        self._admission = Admission(manager, config.watermark)
        guarded = None if connector is None else GuardedConnector(connector)
        self._connector = guarded
        self._loads = None if guarded is None else LoadingRequests(manager, guarded, self._admission, self.inputs)
        self._manager = manager
        self._table = manager.request_table
        self._config = config
        self._num_steps = 0
        self.num_preemptions = 0  # so far
        self._num_preemptions_before = 0  # when the last step was scheduled

    @property
    def waiting(self) -> list[EngineRequest]:
        """Requests that wait, by urgency."""
        return list(self._waiting)

    @property
    def running(self) -> list[EngineRequest]:
        """Requests that run, by urgency."""
        running: list[EngineRequest] = self._by_row.requests[self._rows].tolist()
        return running

    @property
    def running_rows(self) -> RunningRows:
        """What is known of running requests, by row of the table."""
        return self._by_row

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return self._rows.size

    @property
    def num_unfinished(self) -> int:
        """Requests that wait, load or run."""
        return len(self._waiting) + self._rows.size + self.num_loading

    @property
    def loading(self) -> list[EngineRequest]:
        """Requests whose blocks are being loaded."""
        return [] if self._loads is None else self._loads.requests

    @property
    def num_loading(self) -> int:
        """Requests whose blocks are being loaded."""
        return 0 if self._loads is None else len(self._loads)

    def add(self, request: EngineRequest) -> None:
        """Queues a request behind all others of its priority.

        Raises:
            ValueError: it can never run: longer than `max_model_len`, or than a pool holds. Nothing is changed.
        """
        self.check_fits(request)
        self._waiting.add(request)

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
        for pool_id, pool in enumerate(self._manager.block_pools):
            needed = sum(
                group.kv_cache_spec.max_blocks_per_request(num_tokens, in_flight)
                for group in config.kv_cache_groups
                if group.pool_id == pool_id
            )
            if needed > pool.num_usable_blocks:
                raise ValueError(
                    f"request {request.request_id}: {num_tokens} tokens need {needed} blocks of pool {pool_id}, which "
                    f"has {pool.num_usable_blocks} beside the null block and those taken for good; give the pool more "
                    "blocks or the request fewer tokens"
                )

    def abort(self, request: EngineRequest) -> None:
        """Ends a request where it stands. A step in flight that names it is read as usual; its token is dropped."""
        was_running = request.status is RequestStatus.RUNNING
        self._finish(request, FinishReason.ABORT)
        if was_running:
            self._forget_stopped()

    def preempt_last(self) -> None:
        """The least urgent request that runs or loads loses row and blocks, and waits before all of its priority.

        The next step admits nobody.

        Raises:
            ValueError: nothing runs or loads.
        """
        owners = [*self._by_row.requests[self._rows[-1:]], *self.loading]
        if not owners:
            raise ValueError("expected a request that runs or loads to preempt, got none")
        engine_request: EngineRequest = max(owners, key=lambda one: one.urgency)
        if self._loads is not None and engine_request.status is RequestStatus.LOADING:
            self._loads.cancel(engine_request)
        else:
            self._rows = self._rows[:-1]
            self._stop_running(engine_request)
            engine_request.request.num_computed_tokens = 0
            engine_request.request.num_preemptions += 1
            if not self._rows.size:
                self._manager.gather_slabs()
        engine_request.stats.num_preemptions += 1
        engine_request.status = RequestStatus.WAITING
        self._waiting.put_back(engine_request)
        self.num_preemptions += 1

    def schedule(self) -> ScheduledStep | None:
        """Allocates blocks for the next step; None: nothing can run now."""
        if self._waits_for_samples():
            return None
        self._manager.new_step_starts()
        self._num_steps += 1
        next_step = NextStep(self._config.max_num_batched_tokens)
        self._start_loaded(next_step)
        num_released = self._schedule_running(next_step)
        num_preemptions = self.num_preemptions - self._num_preemptions_before
        self._num_preemptions_before = self.num_preemptions
        if not num_preemptions:  # nor could a request come back before its token in flight is read
            self._admit(next_step)
        rows, num_new_tokens, samples = next_step.columns()
        if not rows.size:
            return None
        num_drafts = None
        has_longer = self._config.max_num_batched_tokens - next_step.budget > rows.size
        if self._draft_shares is not None:
            num_drafts = self._draft_shares.allocate(rows, num_new_tokens, samples, next_step.budget)
            if num_drafts is not None:
                num_new_tokens, has_longer = num_new_tokens + num_drafts, True
        order = decode_first(num_new_tokens) if has_longer else slice(None)
        if not isinstance(order, slice):
            rows, num_new_tokens, samples = rows[order], num_new_tokens[order], samples[order]
            num_drafts = None if num_drafts is None else num_drafts[order]
        requests, request_ids = self._columns_by(rows)
        return ScheduledStep(
            requests=requests,
            request_ids=request_ids,
            rows=rows,
            num_new_tokens=num_new_tokens,
            samples=samples,
            token_source=self._flights.token_source(rows),
            admitted=tuple([one for one in next_step.admitted if one.status is RequestStatus.RUNNING]),
            num_preemptions=num_preemptions,
            lookups=next_step.lookups,
            num_released=num_released,
            num_drafts=num_drafts,
        )

    def start(self, step: ScheduledStep) -> list[EngineRequest]:
        """Counts the step's tokens as computed: it is dispatched, and steps run in order.

        Returns:
            The samples that run from now on, as the step has computed their prompts.
        """
        sampling_rows = step.rows if step.all_sample else step.rows[step.samples]
        self._flights.start(step.rows, step.num_new_tokens, sampling_rows)
        return self._fork_samples()

    def update(
        self,
        step: ScheduledStep,
        token_ids: np.ndarray,  # int32[rows of logits of true `samples`] in their order
        logprobs: np.ndarray,  # float32[likewise]
        num_accepted: np.ndarray | None = None,  # int[number of true `samples`] drafts that were right; None: no drafts
    ) -> NewTokens:
        """Gives the sampled tokens to their requests and ends those that are done; steps are updated in order.

        Tokens of a request that ended or was aborted while the step was in flight are dropped, and those behind a token
        that ends its request.
        """
        new = self._delivery.deliver(step, self._flights.read(), token_ids, logprobs, num_accepted)
        if new.ended:
            self._forget_stopped()
        return new

    def end_loads(self, loaded: Iterable[str], failed: Iterable[str]) -> None:
        """Requests whose load has ended: they run from the next step on, or wait again to be computed."""
        for engine_request in () if self._loads is None else self._loads.end(loaded, failed):
            self._waiting.put_back(engine_request)

    def check_invariants(self) -> None:
        """Checks I1 to I4, and the laws of the requests' inputs.

        Raises:
            InvariantError: one does not hold.
        """
        self.inputs.check_invariants()
        running, waiting, loading = self.running, self.waiting, self.loading
        queued = [*running, *waiting]
        self._waiting.check_invariants()
        urgencies = [request.urgency for request in running]
        if urgencies != sorted(set(urgencies)):
            raise InvariantError(f"I1, I3: expected running requests of rising urgency, got {urgencies}")
        owners = [*running, *loading]
        for one in waiting:
            rivals = [owner for owner in owners if owner.priority == one.priority or one.stats.num_preemptions]
            if not one.has_failed_load and any(owner.urgency > one.urgency for owner in rivals):
                raise InvariantError(f"I1: {one.request_id} waits, and requests of less urgency have blocks")
        for i, request in enumerate(queued):
            expected = RequestStatus.RUNNING if i < len(running) else RequestStatus.WAITING
            row = request.request.row
            if request.status is not expected or (row >= 0) != (expected is RequestStatus.RUNNING):
                raise InvariantError(
                    f"I2: {request.request_id} is queued as {expected.value} and is {request.status.value}, row {row}"
                )
        for one in loading:
            if one.status is not RequestStatus.LOADING or one.request.row < 0 or one in queued:
                raise InvariantError(f"I2: {one.request_id} loads, and is {one.status.value}, row {one.request.row}")
        rows, in_arrays = [one.request.row for one in running], np.flatnonzero(self._by_row.is_running).tolist()
        if self._rows.tolist() != rows or sorted(rows) != in_arrays:
            raise InvariantError(f"I4: rows {rows} run, {self._rows.tolist()} are queued, the arrays hold {in_arrays}")

    def _schedule_running(self, next_step: NextStep) -> tuple[int, ...]:
        """Plans the running requests in order, preempting from the end while one does not fit; blocks released."""
        pools = self._manager.block_pools
        num_released = [-pool.num_free_blocks for pool in pools]
        start = 0  # running requests before it are planned, or have nothing to do
        while start < self._rows.size and next_step.budget:
            rows = self._rows[start:] if start else self._rows
            num_left = self._num_left(rows)
            num_new_tokens = self._shares.of_running(self._by_row.requests, rows, num_left, next_step.budget)
            active = None  # places of those that compute anything; None: all do
            if np.count_nonzero(num_new_tokens) < rows.size:
                active = num_new_tokens.nonzero()[0]
                rows, num_new_tokens, num_left = rows[active], num_new_tokens[active], num_left[active]
            num_tokens = int(np.add.reduce(num_new_tokens))
            one_each = num_tokens == rows.size  # none is 0: a number is checked faster than an array
            result = self._manager.plan_step(
                rows, 1 if one_each else num_new_tokens, num_in_flight_tokens=self._flights.num_unread(rows)
            )
            for group, update in zip(self._manager.kv_cache_config.kv_cache_groups, result.new_blocks, strict=True):
                num_released[group.pool_id] += update.block_ids.size
            if result.num_planned == rows.size:
                next_step.take(rows, num_new_tokens, num_left, num_tokens)
                break
            planned = slice(0, result.num_planned)
            num_tokens = int(np.add.reduce(num_new_tokens[planned]))
            next_step.take(rows[planned], num_new_tokens[planned], num_left[planned], num_tokens)
            start += result.num_planned if active is None else int(active[result.num_planned])
            for pool_id, pool in enumerate(pools):  # what the preemption frees is no release
                num_released[pool_id] += pool.num_free_blocks
            self.preempt_last()
            for pool_id, pool in enumerate(pools):
                num_released[pool_id] -= pool.num_free_blocks
        return tuple(released + pool.num_free_blocks for released, pool in zip(num_released, pools, strict=True))

    def _columns_by(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # object[S] each, read-only
        """The requests of a step's rows and their ids: those of the step before while it is the same array of rows."""
        if rows is not self._columns_of:
            self._columns = (self._by_row.requests[rows], self._table.request_ids[rows])
            for column in self._columns:
                column.flags.writeable = False
            self._columns_of = rows
        return self._columns

    def _admit(self, next_step: NextStep) -> None:
        """Admits waiting requests in order, until one does not fit."""
        while next_step.budget and self._may_admit():
            engine_request = self._waiting.first
            request = engine_request.request
            blocks, num_hit = self._manager.get_computed_blocks(request)
            if self._loads is not None:
                start = self._loads.start(engine_request, blocks, num_hit, is_first=not self._rows.size)
                if start is LoadStart.REFUSED:
                    self._admission.refuse(engine_request, self._num_steps)
                if start is LoadStart.LATER:
                    self._loads.ask_ahead(self._waiting)
                if start in (LoadStart.REFUSED, LoadStart.LATER):
                    return
                if start is LoadStart.LOADING:
                    self._waiting.remove(engine_request)
                    self._admission.note_misses(engine_request)
                    continue
            num_left = request.num_tokens - num_hit
            num_new_tokens = self._shares.of_one(engine_request, min(num_left, next_step.budget), num_hit, blocks)
            if not num_new_tokens:  # the budget that is left reaches no end of a block
                return
            is_first = not self._rows.size
            if not self._admission.allocate(engine_request, num_new_tokens, num_hit, blocks, is_first=is_first):
                if is_first and num_hit and self._manager.gather_slabs():
                    continue
                self._admission.refuse(engine_request, self._num_steps)
                return
            self._waiting.remove(engine_request)
            request.num_computed_tokens = num_hit
            self._admission.note_misses(engine_request)
            next_step.admit(engine_request, num_hit)
            self.inputs.start(request.row, engine_request.inputs, num_hit)
            self._start_running(engine_request, num_hit)
            next_step.take(np.array([request.row]), np.array([num_new_tokens]), np.array([num_left]), num_new_tokens)

    def _start_loaded(self, next_step: NextStep) -> None:
        """Requests whose blocks are loaded run, behind what is loaded; the step plans them like others that run."""
        for engine_request in () if self._loads is None else self._loads.take_loaded():
            num_computed = engine_request.request.num_computed_tokens
            next_step.admit(engine_request, num_computed)
            self._start_running(engine_request, num_computed)

    def _fork_samples(self) -> list[EngineRequest]:
        """Starts the waiting samples whose first one has just computed the prompt, while there are rows."""
        forked: list[EngineRequest] = []
        while self._waiting and self._rows.size + self.num_loading < self._config.max_num_seqs:
            sample = self._waiting.first
            first = sample.first_sample
            if first is None or not self._shares.is_at_fork(first):
                break
            left_out = first.request.num_computed_tokens - (first.request.num_prompt_tokens - 1)
            children = self._manager.fork(
                first.request, 1, request_ids=[sample.request_id], num_in_flight_tokens=left_out
            )
            if children is None:
                break
            sample.request = children[0]
            if sample.stats.num_cached_tokens is None:
                sample.stats.num_shared_tokens = sample.request.num_computed_tokens
            self._waiting.remove(sample)
            self.inputs.start(sample.request.row, sample.inputs, sample.request.num_computed_tokens)
            self._start_running(sample, sample.request.num_computed_tokens)
            forked.append(sample)
        return forked

    def _start_running(self, engine_request: EngineRequest, num_hit_tokens: int) -> None:
        """A request that has row, blocks and inputs runs from here on."""
        engine_request.status = RequestStatus.RUNNING
        stats = engine_request.stats
        if stats.num_cached_tokens is None:
            stats.num_cached_tokens = num_hit_tokens
        stats.num_computed_tokens -= num_hit_tokens  # `_stop_running` adds all that the request had computed
        row = engine_request.request.row
        self._by_row.start(row, engine_request)
        if self.drafter is not None:
            self.drafter.start(engine_request)
        place = self._rows.size
        while place and self._by_row.requests[self._rows[place - 1]].urgency > engine_request.urgency:
            place -= 1
        is_last = place == self._rows.size  # always without priorities; `append` is the faster
        self._rows = np.append(self._rows, row) if is_last else np.insert(self._rows, place, row)

    def _stop_running(self, engine_request: EngineRequest) -> None:
        """Takes a running request's row and blocks. The caller removes it from `_rows`."""
        request = engine_request.request
        if self.drafter is not None:
            self.drafter.stop(engine_request)
        self._by_row.stop(request.row, request.num_tokens)
        self.inputs.stop(request.row)
        # Blocks that a token in flight filled could not be registered when they were planned.
        self._manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        engine_request.stats.num_computed_tokens += request.num_computed_tokens
        self._manager.free(request)
        self._admission.refusal = None

    def _finish(self, engine_request: EngineRequest, reason: FinishReason) -> None:
        """Ends a request. The caller calls `_forget_stopped` if it ran."""
        if self._loads is not None and engine_request.status is RequestStatus.LOADING:
            self._loads.cancel(engine_request)
        else:
            if self._connector is not None:  # while the request has its blocks
                self._connector.request_finished(engine_request.request)
            if engine_request.status is RequestStatus.RUNNING:
                self._stop_running(engine_request)
            else:
                self._waiting.remove(engine_request)
        engine_request.status = RequestStatus.FINISHED
        engine_request.finish_reason = reason

    def _forget_stopped(self) -> None:
        """Takes the requests that ended out of `_rows`."""
        self._rows = self._rows[self._by_row.is_running[self._rows]]

    def _waits_for_samples(self) -> bool:
        """Whether a step could hold nothing but a part of the requests that decode, the others being in flight."""
        if self.drafter is None or not self._flights:
            return False
        rows = self._rows
        is_held = np.asarray(self._flights.num_pending(rows)) > 0
        has_prompt = (self._table.num_tokens[rows] - self._table.num_computed_tokens[rows] > 1) & ~is_held
        has_loaded = self._loads is not None and bool(self._loads.loaded)
        return bool(is_held.any() and not has_prompt.any() and not has_loaded and not self._may_admit())

    def _may_admit(self) -> bool:
        """Whether the first waiting request is worth a lookup."""
        if not self._waiting or self._rows.size + self.num_loading >= self._config.max_num_seqs:
            return False
        first = self._waiting.first
        if first.waits_for_first_sample or self._admission.is_refused(first, self._num_steps):
            return False
        return self.inputs.fits(first.inputs)

    def _num_left(self, rows: np.ndarray) -> np.ndarray:  # int64[n]
        """Tokens that running requests still have to compute, those sampled but not read yet included."""
        num_left = self._flights.num_left(rows)
        if not self._flights:
            return num_left
        if self.drafter is not None:
            return np.where(self._flights.num_pending(rows) > 0, 0, num_left)
        num_tokens = self._table.num_computed_tokens[rows] + num_left
        has_all = num_tokens >= self._by_row.max_total_tokens[rows]  # only reading its last is left
        waits = self._by_row.waits_for_token[rows]
        if waits.any():
            has_all |= waits & (self._flights.num_pending(rows) > 0)
        return np.where(has_all, 0, num_left)

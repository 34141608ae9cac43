"""Sampled tokens on their way to their requests, one each or, behind accepted drafts, several.

Flow:    a step's tokens, accepted drafts -> [TokenDelivery.deliver] -> requests, RunningRows -> NewTokens

A request gets the tokens of its rows of logits up to the first draft that was wrong. Tokens are handed out in rounds:
each request gets its first one, then those that go on get their second. So a round is like a step without drafts: a
token that ends its request keeps the next from coming.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.core import KVCacheManager
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.outputs import FinishReason
from kvjax.engine.scheduling.running_rows import RunningRows
from kvjax.engine.scheduling.scheduled_step import NewTokens, ScheduledStep
from kvjax.engine.scheduling.speculation import Drafter


class TokenDelivery:
    """Delivers to the requests of one scheduler, and calls `finish` for each that ends."""

    def __init__(
        self,
        manager: KVCacheManager,
        by_row: RunningRows,
        drafter: Drafter | None,
        finish: Callable[[EngineRequest, FinishReason], None],
    ) -> None:
        self._manager = manager
        self._table = manager.request_table
        self._by_row = by_row
        self._drafter = drafter
        self._finish = finish

    def deliver(
        self,
        step: ScheduledStep,
        rows: np.ndarray,  # int64[n] of its requests that sample
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        num_accepted: np.ndarray | None,
    ) -> NewTokens:
        """`Scheduler.update` of a step that is in flight no more."""
        columns = (step.requests, step.request_ids)
        requests, request_ids = columns if step.all_sample else [column[step.samples] for column in columns]
        all_run = self._all_run(rows)
        going = np.arange(rows.size) if all_run else self._unfinished(requests)
        if step.num_drafts is not None and num_accepted is not None:
            num_rows = step.logits_rows()
            return self._deliver_runs(num_rows, requests, request_ids, rows, going, token_ids, logprobs, num_accepted)
        logits_rows = going
        if going.size < rows.size:
            kept = (requests, request_ids, rows, token_ids, logprobs)
            requests, request_ids, rows, token_ids, logprobs = [column[going] for column in kept]
        first, looked_at, ended = self._give(requests, rows, token_ids, logprobs, all_run=all_run)
        return NewTokens(
            requests=requests,
            request_ids=request_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            first=tuple(first.tolist()),
            ended=tuple(ended),
            looked_at=tuple(looked_at),
            logits_rows=logits_rows,
        )

    def _deliver_runs(
        self,
        num_rows: np.ndarray,  # int64[n] rows of logits of each request that samples
        requests: np.ndarray,  # object[n]
        request_ids: np.ndarray,  # object[n]
        rows: np.ndarray,  # int64[n]
        going: np.ndarray,  # int64[...] places of the requests that are not finished
        token_ids: np.ndarray,  # int32[rows of logits]
        logprobs: np.ndarray,  # float32[likewise]
        num_accepted: np.ndarray,  # int[n]
    ) -> NewTokens:
        """`deliver` where there are drafts. A token's place is its row of logits until all are known."""
        begin = np.cumsum(num_rows) - num_rows
        drafted = going[num_rows[going] > 1]
        drafts = (requests[drafted], rows[drafted], (num_rows - 1)[drafted], num_accepted[drafted])
        self._settle(*drafts)
        taken: list[np.ndarray] = [begin[:0]]
        noted: tuple[list[np.ndarray], ...] = ([begin[:0]], [begin[:0]], [begin[:0]])  # first, looked at, ended
        place = 0
        while going.size:
            if place:
                self._count_accepted(requests[going], rows[going])
            at = begin[going] + place
            first, looked_at, ended = self._give(
                requests[going],
                rows[going],
                token_ids[at],
                logprobs[at],
                all_run=self._all_run(rows[going]),
                is_verified=True,
            )
            taken.append(at)
            for parts, some in zip(noted, (first, looked_at, ended), strict=True):
                parts.append(at[some])
            goes_on = num_accepted[going] > place
            goes_on[ended] = False
            going, place = going[goes_on], place + 1
        self._manager.settle_drafts(drafts[1][self._by_row.is_running[drafts[1]]], 0)  # now that tokens are known
        self._tell_drafter(*drafts[1:])
        at = np.sort(np.concatenate(taken))
        owner = np.searchsorted(begin, at, side="right") - 1
        first, looked_at, ended = (np.searchsorted(at, np.sort(np.concatenate(parts))).tolist() for parts in noted)
        return NewTokens(
            requests=requests[owner],
            request_ids=request_ids[owner],
            token_ids=token_ids[at],
            logprobs=logprobs[at],
            first=tuple(first),
            ended=tuple(ended),
            looked_at=tuple(looked_at),
            logits_rows=at,
            num_accepted=sum(part.size for part in taken[2:]),
        )

    def _all_run(self, rows: np.ndarray) -> bool:
        return np.count_nonzero(self._by_row.is_running[rows]) == rows.size

    def _unfinished(self, requests: np.ndarray) -> np.ndarray:  # int64[...]
        """Places of the requests that run or were preempted; the others ended while their step was in flight."""
        return np.flatnonzero([request.status is not RequestStatus.FINISHED for request in requests])

    def _give(
        self,
        requests: np.ndarray,
        rows: np.ndarray,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        *,
        all_run: bool,
        is_verified: bool = False,
    ) -> tuple[np.ndarray, list[int], list[int]]:
        """Gives each of n requests a token. `all_run`: none is preempted; `is_verified`: of a step with drafts.

        Returns:
            Places of the requests that got their first token, that were looked at, and that the token ends.
        """
        if all_run:
            first, may_end = self._append(rows, token_ids, logprobs)
        else:
            is_running = self._by_row.is_running[rows]
            first, may_end = np.zeros(rows.size, bool), np.ones(rows.size, bool)
            running = is_running.nonzero()[0]
            first[running], may_end[running] = self._append(rows[running], token_ids[running], logprobs[running])
            for place in np.flatnonzero(~is_running).tolist():
                waiting: EngineRequest = requests[place]
                first[place] = not waiting.request.num_output_tokens
                waiting.request.append_output_token_ids(token_ids.item(place))
                waiting.logprobs.append(logprobs.item(place))
        not_finite = np.isnan(logprobs)
        if not_finite.any():
            may_end |= not_finite
            for request in requests[not_finite]:
                request.refuse_logits()
        looked_at: list[int] = may_end.nonzero()[0].tolist()
        return first.nonzero()[0], looked_at, self._end(requests, token_ids, looked_at, is_verified)

    def _append(self, rows: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Appends a token to each row, all of which run: bool[n] whether it is the first, and may be the last."""
        num_tokens = self._table.num_tokens[rows]
        self._table.append_tokens(rows, token_ids)
        first = num_tokens == self._table.num_prompt_tokens[rows]
        return first, self._by_row.append(rows, num_tokens, token_ids, logprobs)

    def _end(self, requests: np.ndarray, token_ids: np.ndarray, places: list[int], is_verified: bool) -> list[int]:
        """Ends the requests at `places` whose newest token ends them, and returns their places.

        No plan will register the blocks that their last accepted drafts filled, so they are registered here.
        """
        ended = []
        for place in places:
            reason = requests[place].finish_reason_after(token_ids.item(place))
            if reason is not None:
                request = requests[place].request
                if is_verified and request.row >= 0:
                    self._manager.cache_blocks(request, request.num_computed_tokens)
                self._finish(requests[place], reason)
                ended.append(place)
        return ended

    def _settle(self, requests: np.ndarray, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Counts drafts that are verified, and takes those back that were wrong."""
        is_running = self._by_row.is_running[rows]
        for request, count in zip(requests[~is_running], num_drafts[~is_running].tolist(), strict=True):
            request.stats.num_draft_tokens += count
        rows, num_drafts = rows[is_running], num_drafts[is_running]
        self._by_row.num_drafted[rows] += num_drafts
        self._manager.settle_drafts(rows, num_drafts - num_accepted[is_running])

    def _count_accepted(self, requests: np.ndarray, rows: np.ndarray) -> None:
        """One more draft of each request becomes output."""
        is_running = self._by_row.is_running[rows]
        self._by_row.num_accepted[rows[is_running]] += 1
        for request in requests[~is_running]:
            request.stats.num_accepted_tokens += 1

    def _tell_drafter(self, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Tells the drafter what was accepted of the requests that still run."""
        runs = self._by_row.is_running[rows]
        if self._drafter is not None and runs.any():
            self._drafter.settle(rows[runs], num_drafts[runs], num_accepted[runs])


__all__ = ["TokenDelivery"]

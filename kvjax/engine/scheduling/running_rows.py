"""What the scheduler knows of running requests, as arrays by row of the request table.

Flow:    EngineRequest -> [RunningRows] -> Scheduler: tokens left, tokens that end a request, log-probabilities

A row's entries are those of the request that runs in it, set when the request starts. A request that is followed, or
has more than `MAX_STOP_COLUMNS` stop tokens, is looked at after each of its tokens; those of the others are compared
in bulk.
"""

from __future__ import annotations

import numpy as np

from kvjax.core.requests.token_ids import MAX_TOKEN_ID
from kvjax.engine.requests.engine_request import EngineRequest

MAX_STOP_COLUMNS = 8
NO_TOKEN = -1


class RunningRows:
    """Arrays by row; rows grow by doubling, and so do the columns of log-probabilities. Owned by one `Scheduler`."""

    def __init__(self, num_rows: int) -> None:
        self.requests = np.full(num_rows, None, np.object_)  # EngineRequest, None: nothing runs in the row
        self.is_running = np.zeros(num_rows, np.bool_)
        self.max_total_tokens = np.zeros(num_rows, np.int64)
        self.num_drafted = np.zeros(num_rows, np.int64)  # drafts since the request started, and those accepted
        self.num_accepted = np.zeros(num_rows, np.int64)
        self._num_tokens_before = np.zeros(num_rows, np.int64)  # when the request started: those have no logprob here
        self._logprobs = np.zeros((num_rows, 64), np.float32)
        self._stop_token_ids = np.full((0, num_rows), NO_TOKEN, np.int32)
        self._is_looked_at = np.zeros(num_rows, np.bool_)
        self.waits_for_token = np.zeros(num_rows, np.bool_)  # no step before the token of the last one is known

    def start(self, row: int, request: EngineRequest) -> None:
        """`request` runs in `row` from here on."""
        while row >= self.is_running.size:
            self._double_rows()
        self.requests[row] = request
        self.is_running[row] = True
        self.max_total_tokens[row] = request.max_total_tokens
        self.num_drafted[row] = self.num_accepted[row] = 0
        self._num_tokens_before[row] = request.request.num_tokens
        stop = sorted(token for token in request.stop_token_ids if 0 <= token <= MAX_TOKEN_ID)  # others never come
        self._is_looked_at[row] = request.is_followed or len(stop) > MAX_STOP_COLUMNS
        self.waits_for_token[row] = request.matcher is not None
        columns = stop[:MAX_STOP_COLUMNS]
        if len(columns) > len(self._stop_token_ids):
            more = np.full((len(columns) - len(self._stop_token_ids), self.is_running.size), NO_TOKEN, np.int32)
            self._stop_token_ids = np.concatenate([self._stop_token_ids, more])
        self._stop_token_ids[:, row] = NO_TOKEN
        self._stop_token_ids[: len(columns), row] = columns

    def stop(self, row: int, num_tokens: int) -> None:
        """The request of `row` stops with `num_tokens` tokens; it gets the log-probabilities and drafts of this run."""
        request, num_new = self.requests[row], num_tokens - self._num_tokens_before.item(row)
        request.logprobs += self._logprobs[row, :num_new].tolist()
        request.stats.num_draft_tokens += self.num_drafted.item(row)
        request.stats.num_accepted_tokens += self.num_accepted.item(row)
        self.requests[row] = None
        self.is_running[row] = False

    def logprobs_of(self, request: EngineRequest, count: int) -> list[float]:
        """Log-probabilities of a request's first `count` output tokens, whether it runs or not."""
        logprobs = request.logprobs[:count]
        row = request.request.row
        if len(logprobs) < count and 0 <= row < self.requests.size and self.requests[row] is request:
            num_before = self._num_tokens_before.item(row) - request.request.num_prompt_tokens
            logprobs += self._logprobs[row, len(logprobs) - num_before : count - num_before].tolist()
        return logprobs

    def append(
        self,
        rows: np.ndarray,  # int64[n] running
        num_tokens: np.ndarray,  # int64[n] before these tokens
        token_ids: np.ndarray,  # int32[n]
        logprobs: np.ndarray,  # float32[n]
    ) -> np.ndarray:  # bool[n]
        """Keeps the log-probabilities of new tokens, one a row; whether each token may end its request."""
        columns = num_tokens - self._num_tokens_before[rows]
        if rows.size and int(columns.max()) >= self._logprobs.shape[1]:
            self._widen(int(columns.max()) + 1)
        self._logprobs.reshape(-1)[rows * self._logprobs.shape[1] + columns] = logprobs
        may_end = num_tokens + 1 >= self.max_total_tokens[rows]
        may_end |= self._is_looked_at[rows]
        for stop_token_ids in self._stop_token_ids:
            may_end |= stop_token_ids[rows] == token_ids
        return may_end

    def _widen(self, num_columns: int) -> None:
        """Room for at least `num_columns` log-probabilities a row; copies those of running requests."""
        old = self._logprobs
        self._logprobs = np.zeros((len(old), max(num_columns, 2 * old.shape[1])), np.float32)
        running = np.flatnonzero(self.is_running)
        self._logprobs[running, : old.shape[1]] = old[running]

    def _double_rows(self) -> None:
        size = self.is_running.size
        self.requests = np.append(self.requests, np.full(size, None, np.object_))
        self.is_running = np.append(self.is_running, np.zeros(size, np.bool_))
        self.max_total_tokens = np.append(self.max_total_tokens, np.zeros(size, np.int64))
        self.num_drafted = np.append(self.num_drafted, np.zeros(size, np.int64))
        self.num_accepted = np.append(self.num_accepted, np.zeros(size, np.int64))
        self._num_tokens_before = np.append(self._num_tokens_before, np.zeros(size, np.int64))
        self._logprobs = np.concatenate([self._logprobs, np.zeros_like(self._logprobs)])
        self._stop_token_ids = np.concatenate([self._stop_token_ids, np.full_like(self._stop_token_ids, NO_TOKEN)], 1)
        self._is_looked_at = np.append(self._is_looked_at, np.zeros(size, np.bool_))
        self.waits_for_token = np.append(self.waits_for_token, np.zeros(size, np.bool_))

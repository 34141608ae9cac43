"""Requests of a step that was broken off, brought back to what their callers were told.

Flow:    an exception in a step -> [restart] -> requests that wait, with the tokens handed over so far -> a new HostLoop

An exception may leave manager, scheduler and pages between two states: a KeyboardInterrupt comes between any two lines.
None of that is mended. What survives is what no step half writes: each request's prompt and parameters, and those of
its tokens that were handed over. `StepEnd` notes how many tokens requests had when a step's own tokens began to
reach them; what is behind is computed again, and a request's tokens depend on its seed and their places alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvjax.core import RequestTable
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.outputs import StepOutputs
from kvjax.engine.scheduling.running_rows import RunningRows
from kvjax.engine.scheduling.scheduled_step import ScheduledStep


@dataclass
class StepEnd:
    """A step whose tokens are being handed to their requests, or have been."""

    requests: np.ndarray  # object[S] EngineRequest of the step
    num_tokens: np.ndarray  # int64[S] that each had before
    outputs: StepOutputs | None = None  # None: some of the step's tokens may be missing still

    @classmethod
    def begin(cls, step: ScheduledStep, table: RequestTable) -> StepEnd:
        """Notes the counts of a step's requests before anything is appended. Costs a gather."""
        num_tokens = table.num_tokens[step.rows]
        if np.count_nonzero(num_tokens) < num_tokens.size:  # some left the table while the step was in flight
            num_tokens = np.array([one.request.num_tokens for one in step.requests], np.int64)
        return cls(step.requests, num_tokens)

    def counts(self) -> dict[EngineRequest, int]:
        """Tokens that were handed over, of the requests that may have more; none once the outputs are whole."""
        if self.outputs is not None:
            return {}
        return dict(zip(self.requests.tolist(), self.num_tokens.tolist(), strict=True))


def restart(requests: Iterable[EngineRequest], end: StepEnd | None, rows: RunningRows) -> list[EngineRequest]:
    """The `requests` that have not ended, waiting: they keep what was handed over, and nothing is computed.

    The same objects, in the given order. May be called again if it was broken off itself. The manager and scheduler
    that held them are of no use afterwards.
    """
    counts = {} if end is None else end.counts()
    restarted = []
    for one in requests:
        if one.status is RequestStatus.FINISHED and one not in counts:
            continue
        num_tokens = counts.get(one, one.request.num_tokens)
        num_output_tokens = num_tokens - one.request.num_prompt_tokens
        one.logprobs = rows.logprobs_of(one, num_output_tokens)
        del one.top_logprobs[num_output_tokens:]
        if one.status is RequestStatus.RUNNING:
            one.stats.num_computed_tokens += one.request.num_computed_tokens
        if not num_output_tokens:
            one.stats.first_token_time_s = None
        had_blocks = one.status is not RequestStatus.WAITING or one.stats.num_cached_tokens is not None
        one.request = one.request.restarted(num_tokens)
        one.request.num_preemptions += had_blocks  # if it is looked up again, that is no first lookup
        one.status, one.finish_reason = RequestStatus.WAITING, None
        one.show_again()
        restarted.append(one)
    return restarted


__all__ = ["StepEnd", "restart"]

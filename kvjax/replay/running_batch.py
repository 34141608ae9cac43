"""The requests that run, in order of arrival, as arrays beside a list of jobs.

Flow:    simulators -> [RunningBatch] -> rows for plan_step, advance, append_tokens
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvjax.core.requests.request import Request
from kvjax.replay.trace import TraceRequest


@dataclass(slots=True)
class Job:
    """One request of the trace on its way."""

    index: int  # in the trace
    source: TraceRequest
    asked_s: float  # when it arrived in the deployment
    arrives_s: float  # at the replica that runs it
    infinite_hit: int  # tokens that an infinite cache would hit, once it has arrived
    outputs_left: int  # tokens to make here; while the job runs, the batch holds the number
    request: Request | None = None  # made at the first attempt to admit it: a backlog holds no prompts
    was_admitted: bool = False  # had blocks at some time
    num_timed: int = 0  # of its first two tokens, those that are there; while the job runs, the batch holds the number
    first_token_s: float = 0.0  # when the first was there
    expected_tokens: int = 0  # to prefill, by what a router knew
    goes_on: bool = False  # once it ends here, another replica makes the rest
    arrival: int = 0  # number of jobs that came to its replica before

    @classmethod
    def of(cls, index: int, source: TraceRequest, arrives_s: float) -> Job:
        """The job of a request of the trace, all of it on one replica."""
        return cls(index, source, arrives_s, arrives_s, 0, source.output_length)


@dataclass(slots=True)
class RunningBatch:
    """Jobs, their rows of the request table, and what they have emitted."""

    jobs: list[Job] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64[n]
    outputs_left: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64[n] tokens
    num_timed: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64[n] tokens, at most 2

    def __len__(self) -> int:
        return len(self.jobs)

    def extend(self, jobs: list[Job], rows: np.ndarray) -> None:
        """Adds jobs in order of arrival, each in its place."""
        is_late = bool(self.jobs) and jobs[0].arrival < self.jobs[-1].arrival  # some were loaded while others came
        self.jobs += jobs
        self.rows = np.concatenate((self.rows, rows))
        self.outputs_left = np.concatenate((self.outputs_left, np.array([job.outputs_left for job in jobs], np.int64)))
        self.num_timed = np.concatenate((self.num_timed, np.array([job.num_timed for job in jobs], np.int64)))
        if is_late:
            self._keep(np.argsort([job.arrival for job in self.jobs]))

    def pop_youngest(self) -> Job:
        """Takes out the job that arrived last."""
        job = self.jobs[-1]
        job.outputs_left, job.num_timed = int(self.outputs_left[-1]), int(self.num_timed[-1])
        self._keep(np.arange(len(self.jobs) - 1))
        return job

    def take_out(self, finished: np.ndarray) -> list[Job]:  # finished: bool[n]
        """Takes out the jobs where `finished` is set."""
        jobs = [self.jobs[i] for i in np.flatnonzero(finished).tolist()]
        if jobs:
            self._keep(np.flatnonzero(~finished))
        return jobs

    def _keep(self, kept: np.ndarray) -> None:  # int64[k] places, in their new order
        self.jobs = [self.jobs[place] for place in kept.tolist()]
        self.rows, self.outputs_left = self.rows[kept], self.outputs_left[kept]
        self.num_timed = self.num_timed[kept]

"""The requests that run, in order of admission, as arrays beside a list of jobs.

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
    infinite_hit: int  # tokens that an infinite cache would hit
    outputs_left: int  # tokens; while the job runs, the batch holds the number
    request: Request | None = None  # made at the first attempt to admit it: a backlog holds no prompts
    has_started: bool = False  # has its first token; while the job runs, the batch says so


@dataclass(slots=True)
class RunningBatch:
    """Jobs, their rows of the request table, and what they have emitted."""

    jobs: list[Job] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64[n]
    outputs_left: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64[n] tokens
    has_started: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))  # bool[n]

    def __len__(self) -> int:
        return len(self.jobs)

    def extend(self, jobs: list[Job], rows: np.ndarray) -> None:
        """Adds admitted jobs."""
        self.jobs += jobs
        self.rows = np.concatenate((self.rows, rows))
        self.outputs_left = np.concatenate((self.outputs_left, np.array([job.outputs_left for job in jobs], np.int64)))
        self.has_started = np.concatenate((self.has_started, np.array([job.has_started for job in jobs], np.bool_)))

    def pop_youngest(self) -> tuple[Job, int]:
        """Takes out the job admitted last, and its row."""
        job, row = self.jobs[-1], int(self.rows[-1])
        job.outputs_left, job.has_started = int(self.outputs_left[-1]), bool(self.has_started[-1])
        self._keep(np.arange(len(self.jobs)) < len(self.jobs) - 1)
        return job, row

    def take_out(self, finished: np.ndarray) -> list[Job]:  # finished: bool[n]
        """Takes out the jobs where `finished` is set."""
        jobs = [self.jobs[i] for i in np.flatnonzero(finished).tolist()]
        if jobs:
            self._keep(~finished)
        return jobs

    def _keep(self, kept: np.ndarray) -> None:  # kept: bool[n]
        self.jobs = [job for job, stays in zip(self.jobs, kept.tolist(), strict=True) if stays]
        self.rows, self.outputs_left = self.rows[kept], self.outputs_left[kept]
        self.has_started = self.has_started[kept]

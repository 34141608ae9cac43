"""When the requests of a trace come: at their times, or once they have the answer that they wait for.

Flow:    trace -> [Arrivals.begin] -> Timeline; a job ended -> [Arrivals.ended] -> Timeline, for those that waited
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvjax.replay.requests.job import Job
from kvjax.replay.requests.trace import TraceRequest
from kvjax.replay.virtual_time.timeline import Timeline


@dataclass
class Arrivals:
    """The requests of one trace on their way into a replay."""

    trace: Sequence[TraceRequest]
    timeline: Timeline
    on_progress: Callable[[int], object]  # called with the number of requests that were finished
    num_done: int = 0  # that ended or were refused
    _arrive: Callable[[Job], object] = lambda job: None
    _waiting: dict[int, list[int]] = field(default_factory=dict)  # request -> those that wait for its answer

    def begin(self, arrive: Callable[[Job], object]) -> None:
        """Notes all that comes at its time; `arrive` is called with each job when it comes."""
        self._arrive = arrive
        for index, source in enumerate(self.trace):
            if source.after < 0:
                self._at(index, source.timestamp_ms / 1e3)
            else:
                self._waiting.setdefault(source.after, []).append(index)

    def ended(self, job: Job, time_s: float) -> None:
        """A job has its answer, or was refused: what waited for it comes after its pause."""
        self.count(1)
        for index in self._waiting.pop(job.index, ()):
            self._at(index, time_s + self.trace[index].pause_ms / 1e3)

    def count(self, num_finished: int) -> None:
        """Requests have ended or were refused."""
        self.num_done += num_finished
        self.on_progress(num_finished)

    def _at(self, index: int, time_s: float) -> None:
        self.timeline.at(time_s, partial(self._come, index, time_s))

    def _come(self, index: int, time_s: float) -> None:
        self._arrive(Job.of(index, self.trace[index], time_s))


__all__ = ["Arrivals"]

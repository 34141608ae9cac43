"""One run of a trace in virtual time: what replays of one replica, of several, and of two sides have in common.

Flow:    trace -> [Run.play]: arrivals and the replicas' steps on one timeline -> [Run.extent] -> results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from kvjax.replay.bounds.infinite_cache import InfiniteCache
from kvjax.replay.garbage import no_garbage_collection
from kvjax.replay.requests.arrivals import Arrivals
from kvjax.replay.requests.job import Job
from kvjax.replay.requests.trace import TraceRequest
from kvjax.replay.virtual_time.timeline import Steps, Timeline


class Run:
    """Arrivals, timeline, infinite cache and the time on the wall. Used for one replay."""

    def __init__(self, trace: Sequence[TraceRequest], block_size: int, on_progress: Callable[[int], object]) -> None:
        """A run that begins now; `on_progress` is called with the number of requests that were finished.

        Raises:
            ValueError: the trace is empty.
        """
        if not trace:
            raise ValueError("expected a trace of at least one request, got none")
        self.timeline = Timeline()
        self.arrivals = Arrivals(trace, self.timeline, on_progress)
        self.infinite = InfiniteCache(block_size)
        self._start = perf_counter()

    def play(self, replicas: Sequence[Steps], arrive: Callable[[Job], object], should_stop: Callable[[], bool]) -> None:
        """Calls `arrive` with each job when it comes, which knows its infinite hit, and lets replicas take steps."""

        def look_up(job: Job) -> None:
            job.infinite_hit = self.infinite.lookup_and_add(job.source)
            arrive(job)

        self.arrivals.begin(look_up)
        with no_garbage_collection():
            self.timeline.play(replicas, should_stop)

    def extent(self, virtual_seconds: float) -> dict[str, Any]:
        """The fields of a `ReplayExtent`."""
        return {
            "num_requests": len(self.arrivals.trace),
            "num_done": self.arrivals.num_done,
            "virtual_seconds": virtual_seconds,
            "wall_seconds": perf_counter() - self._start,
        }


__all__ = ["Run"]

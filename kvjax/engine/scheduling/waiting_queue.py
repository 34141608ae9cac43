"""Requests that wait, the most urgent first: by priority, and by arrival among equals.

Flow:    Scheduler.add, preemption -> [WaitingQueue] -> Scheduler admits the first

A queue in order of arrival for each priority that occurs. Requests join at its end, one that was preempted near its
head: but for those whose load failed, those of its priority that wait arrived later.

Invariants (`check_invariants`):

    I1  `EngineRequest.urgency` rises from the first to the last
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.errors import InvariantError


class WaitingQueue:
    """Owned by one scheduler. Every call costs O(1) and, where a priority comes or goes, O(priorities)."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[EngineRequest, None]] = {}  # by priority, none of them empty
        self._priorities: list[int] = []  # of the queues, rising
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[EngineRequest]:
        for priority in self._priorities:
            yield from self._queues[priority]

    @property
    def first(self) -> EngineRequest:
        """The most urgent request, of a queue that is not empty."""
        return next(iter(self._queues[self._priorities[0]]))

    def add(self, request: EngineRequest) -> None:
        """Queues a request behind all of its priority."""
        self._queue_of(request.priority)[request] = None
        self._num_requests += 1

    def put_back(self, request: EngineRequest) -> None:
        """Queues a request that ran, or was loading, before all of its priority that arrived later.

        O(1) unless one that arrived before waits too: a load failed, or its request was preempted meanwhile.
        """
        queue = self._queue_of(request.priority)
        earlier = []
        for one in queue:
            if one.arrival > request.arrival:
                break
            earlier.append(one)
        queue[request] = None
        for one in (request, *reversed(earlier)):
            queue.move_to_end(one, last=False)
        self._num_requests += 1

    def remove(self, request: EngineRequest) -> None:
        """Takes out a request that waits."""
        queue = self._queues[request.priority]
        del queue[request]
        self._num_requests -= 1
        if not queue:
            del self._queues[request.priority]
            self._priorities.remove(request.priority)

    def check_invariants(self) -> None:
        """Checks I1.

        Raises:
            InvariantError: it does not hold.
        """
        urgencies = [request.urgency for request in self]
        if urgencies != sorted(set(urgencies)) or len(urgencies) != self._num_requests:
            raise InvariantError(f"I1: expected {self._num_requests} requests of rising urgency, got {urgencies}")

    def _queue_of(self, priority: int) -> OrderedDict[EngineRequest, None]:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            insort(self._priorities, priority)
        return queue


__all__ = ["WaitingQueue"]

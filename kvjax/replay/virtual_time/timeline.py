"""Virtual time of one replica or several: arrivals and steps in one order.

Flow:    Timeline.at(time, what arrives), replicas -> [Timeline.play] -> all has happened, or it is to stop

What arrives at a time comes before the steps that begin then, and of two arrivals at one time the one that was noted
first. A step happens when it begins: so whoever has the earliest time can not be told of anything that comes later, and
what replicas share (a disk, a link) is asked for in the order of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol


class Steps(Protocol):
    """What runs in steps: a replica."""

    @property
    def next_step_s(self) -> float:
        """When the next step begins; infinite: there is nothing to do."""

    def step(self) -> None:
        """Runs one step."""


@dataclass
class Timeline:
    """What is yet to arrive."""

    _events: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)  # heap
    _order: count[int] = field(default_factory=count)

    def at(self, time_s: float, happens: Callable[[], object]) -> None:
        """Notes what happens at a time that has not passed."""
        heappush(self._events, (time_s, next(self._order), happens))

    def play(self, replicas: Sequence[Steps], should_stop: Callable[[], bool]) -> None:
        """Lets all happen; `should_stop` is asked before each step and each arrival."""
        while not should_stop():
            replica = min(replicas, key=_next_step_s)
            arrives_s = self._events[0][0] if self._events else math.inf
            if arrives_s <= replica.next_step_s:
                if not self._events:
                    return
                heappop(self._events)[2]()
            else:
                replica.step()


def _next_step_s(replica: Steps) -> float:
    return replica.next_step_s


__all__ = ["Steps", "Timeline"]

"""Where the time of an engine's steps goes: schedule, plan, dispatch, wait for the device, update.

Flow:    LLMEngine.step -> [timed_steps] -> StepParts

The methods of the engine's parts are wrapped while the block runs. A call within another counts in itself only, so the
parts of a step add up to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

PARTS = ("schedule", "plan", "dispatch", "wait", "update", "other")


@dataclass(frozen=True)
class StepParts:
    """Means over steps, in microseconds by part: `wall_us` of the clock, `cpu_us` of the engine's thread."""

    num_steps: int
    wall_us: dict[str, float]
    cpu_us: dict[str, float]

    @property
    def step_wall_us(self) -> float:
        """A whole step."""
        return sum(self.wall_us.values())

    @property
    def step_cpu_us(self) -> float:
        """The engine's thread in a whole step."""
        return sum(self.cpu_us.values())


class StepTimer:
    """Seconds by part since `reset`. Used from the engine's thread."""

    def __init__(self) -> None:
        """A timer of `PARTS`, of which "other" are the steps."""
        self.reset()

    def reset(self) -> None:
        """Forgets what was timed."""
        self._wall_s = dict.fromkeys(PARTS, 0.0)
        self._cpu_s = dict.fromkeys(PARTS, 0.0)
        self._inner = [(0.0, 0.0)]  # of each call that runs, what calls within it took
        self._num_steps = 0

    def parts(self) -> StepParts:
        """Means over the steps so far."""
        steps = max(self._num_steps, 1)
        wall_us, cpu_us = (
            {part: seconds[part] * 1e6 / steps for part in PARTS} for seconds in (self._wall_s, self._cpu_s)
        )
        return StepParts(self._num_steps, wall_us, cpu_us)

    def wrapped(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, timed as `part`; calls of "other" are the steps."""

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append((0.0, 0.0))
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                inner_wall, inner_cpu = self._inner.pop()
                self._wall_s[part] += wall - inner_wall
                self._cpu_s[part] += cpu - inner_cpu
                outer_wall, outer_cpu = self._inner[-1]
                self._inner[-1] = (outer_wall + wall, outer_cpu + cpu)
                self._num_steps += part == "other"

        return timed


@contextmanager
def timed_steps() -> Iterator[StepTimer]:
    """Times the steps of all engines of the process during the block."""
    from kvjax.engine import LLMEngine
    from kvjax.engine.scheduling.scheduler import Scheduler
    from kvjax.engine.step.host_loop import HostLoop
    from kvjax.engine.step.model_runner import ModelRunner

    timer = StepTimer()
    methods: list[tuple[type, str, str]] = [
        (Scheduler, "schedule", "schedule"),
        (HostLoop, "begin_step", "plan"),
        (ModelRunner, "dispatch", "dispatch"),
        (ModelRunner, "read", "wait"),
        (HostLoop, "end_step", "update"),
        (LLMEngine, "step", "other"),
    ]
    plain = [getattr(owner, name) for owner, name, _ in methods]
    try:
        for (owner, name, part), method in zip(methods, plain, strict=True):
            setattr(owner, name, timer.wrapped(part, method))
        yield timer
    finally:
        for (owner, name, _), method in zip(methods, plain, strict=True):
            setattr(owner, name, method)

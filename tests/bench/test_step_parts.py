"""Parts of a step add up to it, and the engine's methods are its own again afterwards."""

from __future__ import annotations

import pytest

from kvjax.bench.step_parts import PARTS, StepTimer, timed_steps
from kvjax.engine import LLMEngine
from kvjax.engine.step.host_loop import HostLoop


class Clock:
    """In place of the module `time`; all seconds are exact in binary."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def pass_by(self, cpu_s: float, idle_s: float = 0.0) -> None:
        self.wall_s += cpu_s + idle_s
        self.cpu_s += cpu_s


def test_a_call_within_another_counts_in_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("kvjax.bench.step_parts.time", clock)
    timer = StepTimer()
    schedule = timer.wrapped("schedule", lambda: clock.pass_by(2.0))
    plan = timer.wrapped("plan", lambda: (clock.pass_by(0.5), schedule(), clock.pass_by(0.5)))
    wait = timer.wrapped("wait", lambda: clock.pass_by(0.25, idle_s=8.0))
    step = timer.wrapped("other", lambda: (plan(), clock.pass_by(4.0), wait()))
    for _ in range(2):
        step()
        clock.pass_by(16.0)  # between steps
    parts = timer.parts()
    assert parts.num_steps == 2
    nothing = {"dispatch": 0.0, "update": 0.0}
    assert parts.wall_us == {"schedule": 2e6, "plan": 1e6, "wait": 8.25e6, "other": 4e6} | nothing
    assert parts.cpu_us == {"schedule": 2e6, "plan": 1e6, "wait": 0.25e6, "other": 4e6} | nothing
    assert (parts.step_wall_us, parts.step_cpu_us) == (15.25e6, 7.25e6)
    timer.reset()
    assert timer.parts().num_steps == 0
    assert set(timer.parts().wall_us) == set(PARTS)


def test_a_step_that_fails_is_timed_and_raises() -> None:
    timer = StepTimer()

    def fail() -> None:
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        timer.wrapped("other", fail)()
    assert timer.parts().num_steps == 1


def test_methods_are_as_before_even_after_an_error() -> None:
    before = (LLMEngine.step, HostLoop.begin_step)

    def be_interrupted() -> None:
        with timed_steps():
            assert LLMEngine.step is not before[0]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert (LLMEngine.step, HostLoop.begin_step) == before

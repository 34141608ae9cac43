"""Parts of a step add up to it, and the engine's methods are its own again afterwards."""

from __future__ import annotations

import time

import pytest

from kvjax.bench.step_parts import PARTS, StepTimer, timed_steps
from kvjax.engine import LLMEngine
from kvjax.engine.step.host_loop import HostLoop


def test_a_call_within_another_counts_in_itself_only() -> None:
    timer = StepTimer()
    schedule = timer.wrapped("schedule", lambda: time.sleep(0.02))
    plan = timer.wrapped("plan", lambda: (schedule(), time.sleep(0.01)))
    wait = timer.wrapped("wait", lambda: time.sleep(0.03))
    step = timer.wrapped("other", lambda: (plan(), wait()))
    start = time.perf_counter()
    for _ in range(2):
        step()
    seconds = time.perf_counter() - start
    parts = timer.parts()
    assert parts.num_steps == 2
    assert parts.step_wall_us == sum(parts.wall_us.values()) <= seconds / 2 * 1e6
    assert parts.wall_us["schedule"] >= 20_000
    assert parts.wall_us["plan"] >= 10_000
    assert parts.wall_us["wait"] >= 30_000
    assert (parts.wall_us["dispatch"], parts.wall_us["update"]) == (0, 0)
    assert parts.wall_us["other"] < seconds / 2 * 1e6 - 60_000
    assert sum(parts.cpu_us.values()) == parts.step_cpu_us < parts.step_wall_us  # it slept
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

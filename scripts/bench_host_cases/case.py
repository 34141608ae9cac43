"""What one host benchmark is: our code and a plain baseline, each timed in the same process.

Flow:    bench_host_cases.<module>.cases() -> list[BenchCase] -> scripts/bench_host.py -> table, JSON
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class BenchCase:
    """A named pair of measurements; each call builds its own state and returns one sample per repetition.

    The samples are microseconds of CPU time of the timed part alone. `baseline` does the same work in the plain way: a
    loop over requests or blocks with lists and dicts.
    """

    name: str
    run: Callable[[], list[float]]
    baseline: Callable[[], list[float]]


def time_us(call: Callable[[], object]) -> float:
    """Microseconds of this thread's CPU time that one call takes: what else the machine runs does not count."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e3


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sample_us(call: Callable[[], object], repetitions: int, prepare: Callable[[], object] | None = None) -> list[float]:
    """Microseconds of `repetitions` calls, collector off; `prepare` runs untimed before each, and once to warm up."""
    samples = []
    with collector_off():
        for _ in range(repetitions + 1):
            if prepare is not None:
                prepare()
            samples.append(time_us(call))
    return samples[1:]

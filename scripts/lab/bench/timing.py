"""Times of a chain of calls on a device that runs them after they were dispatched.

Flow:    Chain -> [wall_clock] -> Timing: a sample in microseconds of one call, for each repetition

A sample is a batch: so many programs are dispatched one after the other that the device is busy for `BATCH_SECONDS`,
then `block_until_ready` waits for the last. Dispatch runs ahead of the device, so it costs only the way there and back
of the batch, which is measured as that of an empty program and taken off. The arguments of a program, and those of its
calls, are different arrays (`chain.num_rotated`): together they are twice what the caches hold. A call of fewer
microseconds than its dispatch is not hidden by this; the calls of one program share a dispatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from scripts.lab.bench.chain import Chain

BATCH_SECONDS = 0.1
_MOST_PROGRAMS = 1024


@dataclass(frozen=True)
class Timing:
    """Samples of one call."""

    samples_us: tuple[float, ...]
    clock: str  # "wall" or "cupti" or "cuda events"

    @property
    def median_us(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples_us)

    @property
    def spread_us(self) -> float:
        """Between the first and the third quartile; 0 of one sample."""
        if len(self.samples_us) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return third - first


def wall_clock(chain: Chain, repeats: int) -> Timing:
    """As above, after a warm-up that finds the size of a batch."""
    empty = empty_seconds()
    num_programs = batch_size(lambda count: _batch_seconds(chain.run, count) - empty)
    samples = [_batch_seconds(chain.run, num_programs) - empty for _ in range(repeats)]
    return Timing(tuple(1e6 * max(s, 0.0) / (num_programs * chain.num_calls) for s in samples), "wall")


def batch_size(seconds_of: Callable[[int], float]) -> int:
    """Programs of a batch that takes `BATCH_SECONDS`; the first call, which compiles, is not counted."""
    seconds_of(1)
    count = 1
    while count < _MOST_PROGRAMS and (seconds := seconds_of(count)) < BATCH_SECONDS:
        growth = BATCH_SECONDS / seconds if seconds > 0 else 16.0
        count = min(_MOST_PROGRAMS, max(count + 1, int(count * min(growth, 16.0) * 1.1)))
    return count


def empty_seconds(repeats: int = 20) -> float:
    """There and back: a program that does nothing, dispatched and waited for."""
    program, number = jax.jit(lambda x: x + 1), jnp.zeros((), jnp.int32)
    return statistics.median([_batch_seconds(lambda: program(number), 1) for _ in range(repeats + 1)][1:])


def _batch_seconds(run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - start

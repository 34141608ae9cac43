"""Times of a chain on an NVIDIA GPU, and what the card can do, measured the same way.

Flow:    Chain -> [gpu_clock] -> Timing;  device -> [measured_peaks] -> Peaks

The profiler (CUPTI) gives the time of every kernel that a program launches: their sum, without the gaps between them,
over the calls of the program. Each sample runs the program twice, first to warm up. Where there is no CUPTI, and where
pages are donated, which the profiler's two runs do not allow, it is the wall clock of a batch (`timing`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cases.case import Arguments
from scripts.lab.bench.chain import Chain
from scripts.lab.bench.report import Peaks
from scripts.lab.bench.timing import Timing, wall_clock

_REPEATS = 10


def gpu_clock(chain: Chain, repeats: int) -> Timing:
    """By CUPTI if it can, else by the wall clock."""
    return wall_clock(chain, repeats) if chain.writes else cupti(chain, repeats) or wall_clock(chain, repeats)


def cupti(chain: Chain, repeats: int) -> Timing | None:
    """Samples of the profiler, or None where it sees nothing."""
    from jax.experimental.mosaic.gpu import profiler

    run = profiler.measure(chain.program)
    samples = []
    for _ in range(repeats):
        try:
            _, milliseconds = run(*chain.arguments)
        except (RuntimeError, AttributeError):
            return None
        if not milliseconds:
            return None
        samples.append(1e3 * milliseconds / chain.num_calls)
    return Timing(tuple(samples), "cupti")


def launches(chain: Chain) -> float | None:
    """Kernels that one call of the chain launches, or None where the profiler sees nothing."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, kernels = profiler.measure(chain.program, aggregate=False)(*chain.arguments)
    except (RuntimeError, AttributeError):
        return None
    return len(kernels) / chain.num_calls if kernels else None


def measured_peaks(clock: Any = gpu_clock, *, copied_bytes: int = 1 << 30, matrix: int = 8192) -> Peaks:
    """Bytes read and written per second by a copy, and operations of a product of bfloat16 matrices."""
    words = jnp.arange(copied_bytes // 4, dtype=jnp.uint32)
    copy = Chain(lambda pages, rest: (pages[0] ^ jnp.uint32(1), ()), _twice(words), writes=False)
    bytes_per_s = 2 * words.nbytes / (clock(copy, _REPEATS).median_us * 1e-6)
    del copy, words
    square = jax.random.normal(jax.random.key(0), (matrix, matrix), jnp.bfloat16)
    product = Chain(lambda pages, rest: (pages[0] @ pages[0], ()), _twice(square), writes=False)
    flops_per_s = 2 * matrix**3 / (clock(product, _REPEATS).median_us * 1e-6)
    return Peaks(bytes_per_s, flops_per_s, f"measured: copy of {copied_bytes >> 20} MiB, bf16 product of {matrix}^3")


def _twice(array: jax.Array) -> list[Arguments]:
    return [Arguments((array,), jnp.zeros(())), Arguments((array + 1,), jnp.zeros(()))]

"""Runs kernels on a device where there is one, else interpreted on CPU: for tests, the fuzzer and benchmarks.

Flow:    function of a backend, arguments -> [compile_for] -> calls that give numpy arrays, and fail on a race
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def compile_for(
    backend: str, function: Callable[..., Any], *arguments: Any, watch_races: bool = True
) -> Callable[..., Any]:
    """`function`, which calls kernels of `backend`, compiled for arguments of these shapes.

    `watch_races`: where a kernel is interpreted, which takes twice as long then.
    """
    if backend == "tpu":
        from pallas_kernels.interpret.on_tpu import compile_on_tpu

        return compile_on_tpu(function, *arguments, watch_races=watch_races)
    if backend == "gpu":
        from pallas_kernels.interpret.on_gpu import compile_on_gpu

        return compile_on_gpu(function, *arguments, watch_races=watch_races)
    import jax
    import numpy as np

    jitted = jax.jit(function)
    return lambda *given: jax.tree.map(np.asarray, jitted(*given))


@contextmanager
def interpreted(backend: str) -> Iterator[None]:
    """Kernels of `backend` run on CPU, whatever calls them."""
    if backend == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield
    elif backend == "gpu":
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

        from pallas_kernels.interpret.quick_callbacks import quick_callbacks

        with force_gpu_interpret_mode(InterpretGPUParams()), quick_callbacks():
            yield
    else:
        yield

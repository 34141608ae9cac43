"""Runs a GPU kernel: compiled where there is an NVIDIA GPU, else interpreted on CPU with races watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

from pallas_kernels.interpret.on_device import call_on
from pallas_kernels.interpret.quick_callbacks import QUICK_COMPILE, quick_callbacks


def gpu_device() -> jax.Device | None:
    """An NVIDIA GPU, if this machine has one that JAX_PLATFORMS lets tests see."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


def compile_on_gpu(function: Callable[..., Any], *arguments: Any, watch_races: bool = True) -> Callable[..., Any]:
    """`function` compiled for arguments of these shapes; calls give numpy arrays and fail on a race."""
    device = gpu_device()
    if device is not None:
        return call_on(device, function)
    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=watch_races)):
        compiled = jax.jit(function).lower(*arguments).compile(compiler_options=QUICK_COMPILE)

    def call(*arguments: Any) -> Any:
        try:
            with quick_callbacks():
                result = jax.tree.map(np.asarray, compiled(*arguments))
            races = gpu_callbacks._races  # None where no kernel ran
            assert not (watch_races and races is not None and races.races_found), "the interpreter saw a race"
        finally:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
        return result

    return call

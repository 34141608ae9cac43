"""Runs a TPU kernel: compiled where there is a TPU, else interpreted on CPU with races watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret.on_device import call_on

# Optimising the interpreter's program costs more than it saves.
_QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def tpu_device() -> jax.Device | None:
    """A TPU, if this machine has one that JAX_PLATFORMS lets tests see."""
    try:
        return jax.devices("tpu")[0]
    except RuntimeError:
        return None


# Numbers of a vector clock: one for the core, the others for DMAs. With the default of 2 all DMAs share one, and then
# waiting for any of them hides the races of the others.
_CLOCK_SIZE = 256


class RaceError(AssertionError):
    """The interpreter saw two accesses that nothing orders."""


@contextlib.contextmanager
def _races_watched() -> Iterator[None]:
    """Raises RaceError at the end if the interpreter saw a race in any kernel; jax 0.10 keeps those of the last."""
    states: list[Any] = []
    make = interpret_pallas_call.RaceDetectionState

    def keep(*args: Any, **kwargs: Any) -> Any:
        states.append(make(*args, **kwargs))
        return states[-1]

    with mock.patch.object(interpret_pallas_call, "RaceDetectionState", keep):
        yield
    if any(state.races_found for state in states):
        raise RaceError("the interpreter saw a race")


def compile_on_tpu(function: Callable[..., Any], *arguments: Any, watch_races: bool = True) -> Callable[..., Any]:
    """`function` compiled for arguments of these shapes; calls give numpy arrays or raise RaceError."""
    device = tpu_device()
    if device is not None:
        return call_on(device, function)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=watch_races, vector_clock_size=_CLOCK_SIZE)):
        compiled = jax.jit(function).lower(*arguments).compile(compiler_options=_QUICK_COMPILE)

    def call(*arguments: Any) -> Any:
        try:
            with _races_watched():
                return jax.tree.map(np.asarray, compiled(*arguments))
        except jax.errors.JaxRuntimeError as error:
            pltpu.reset_tpu_interpret_mode_state()
            if "RACE DETECTED" in str(error):  # as jax 0.12 tells; 0.10 goes on and remembers
                raise RaceError(str(error)[-2000:]) from error
            raise

    return call

"""Quick callbacks for Pallas' interpreter of GPU kernels, which makes one of each load, store and barrier.

jax puts a callback's arguments on a device first, which takes most of the time of an interpreted kernel. The
interpreter does with numpy arrays, and with Python's numbers for indices.

A callback also runs the warpgroups of each thread block, as programs of their own: jax 0.10 compiles them anew every
time, later ones trace them. Here they are compiled once. And jax 0.10 leaves warpgroups waiting for ever on one that
failed: here they fail, too.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import core, dispatch
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# Optimising the interpreter's program costs more than it saves.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_compiling = threading.Lock()


@contextmanager
def quick_callbacks() -> Iterator[None]:
    """While this is open `io_callback` hands over host values, and warpgroups run programs that are compiled once."""
    with (
        mock.patch.object(jax_callback, "io_callback_impl", _call),
        mock.patch.object(thread_map, "_run_jaxpr", _run),
    ):
        try:
            yield
        except Exception:
            dispatch.runtime_tokens.clear()  # the order of effects goes on from what failed
            raise


def _run(jaxpr: Any, consts: Any, *arguments: Any) -> None:
    with _compiling:
        program = _compiled(jaxpr)
    program(consts, *arguments)


@functools.lru_cache(maxsize=8)
def _compiled(jaxpr: Any) -> Callable[..., None]:
    def run(consts: Any, *arguments: Any) -> None:
        core.eval_jaxpr(jaxpr, consts, *arguments)

    consts, arguments = (
        [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables]
        for variables in (jaxpr.constvars, jaxpr.invars)
    )
    program: Callable[..., None] = jax.jit(run).lower(consts, *arguments).compile(compiler_options=QUICK_COMPILE)
    return program


def _call(*arguments: Any, callback: Callable[..., Any], **_: Any) -> Any:
    try:
        return jax.tree.map(np.asarray, callback(*map(_host_value, arguments)))
    except Exception:
        if not hasattr(gpu_callbacks, "fail_on_exception"):
            _end_waits()
        raise


def _end_waits() -> None:
    """Puts every barrier in a phase that nobody awaits, which is an error of whoever waits."""
    barriers: list[Any] = list(gpu_callbacks._get_shared_memory().mem.values())
    for barrier in barriers:
        if hasattr(barrier, "next_awaited_phase_by_thread"):
            with barrier.cv:
                barrier.phase = sys.maxsize
                barrier.cv.notify_all()


def _host_value(x: Any) -> Any:
    """A copy: the interpreter may keep it, jax's buffer ends with the callback."""
    x = np.array(x)
    return x.item() if x.ndim == 0 and x.dtype.kind in "biu" else x

"""What differs between compiling a TPU kernel and interpreting it, and between versions of Pallas.

Flow:    kernel_tpu.py of every op -> [mosaic] -> jax.experimental.pallas

A kernel reads 16- and 8-bit arrays as 32-bit words through `pl.Ref.bitcast` and `reshape`, which the TPU interpreter
(jax 0.10 to 0.12) does not know; `is_interpreted` lets the few functions that do so read the same elements plainly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as _config
from jax.experimental.pallas import tpu as pltpu

# Types of a kernel's references and DMAs, which Pallas does not export for annotations.
Ref = Any
Copy = Any

LANES = 128
SUBLANES = 8


def is_interpreted() -> bool:
    """Whether `pallas_call` is interpreted here: inside `pltpu.force_tpu_interpret_mode`."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def compiler_params(vmem_limit_bytes: int, grid_rank: int = 1) -> pltpu.CompilerParams:
    """Parameters of every kernel: grid steps in order, a limit of its own, no check of each DMA's bounds."""
    return pltpu.CompilerParams(
        dimension_semantics=[pltpu.ARBITRARY] * grid_rank,
        vmem_limit_bytes=vmem_limit_bytes,
        disable_bounds_checks=True,
    )


def matrix_unit_lanes() -> int:
    """Columns of the matrix unit of the chip that is compiled for; 256, as v6e has, where that is unknown."""
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except (ValueError, NotImplementedError, RuntimeError):  # no TPU, as where the kernel is interpreted
        return 256


def packing(dtype: jnp.dtype) -> int:
    """Elements of `dtype` in a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def words(ref: Ref, *leading: jax.Array | int) -> Ref:
    """`ref[leading]` of shape [n, rows, packing, lanes] as uint32[n * rows, lanes]; only where compiled."""
    view = ref.bitcast(jnp.uint32)
    view = view.at[leading] if leading else view
    return view.reshape(view.shape[0] * view.shape[1], view.shape[-1])


def load_words(ref: Ref) -> jax.Array:
    """uint32[n, lanes] of `ref` [n, packing, lanes]."""
    if not is_interpreted():
        return words(ref.reshape(1, *ref.shape), 0)[...]
    x = ref[...].swapaxes(1, 2)
    return lax.bitcast_convert_type(x[..., 0] if x.shape[2] == 1 else x, jnp.uint32)


def store_words(ref: Ref, value: jax.Array) -> None:
    """Stores uint32[n, lanes] into `ref` [n, packing, lanes]."""
    if not is_interpreted():
        view = ref.bitcast(jnp.uint32)
        view.reshape(view.shape[0], view.shape[2])[...] = value
        return
    x = lax.bitcast_convert_type(value, ref.dtype)
    ref[...] = x[:, None] if x.ndim == 2 else x.swapaxes(1, 2)

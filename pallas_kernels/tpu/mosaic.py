"""What differs between compiling a TPU kernel and interpreting it, and between versions of Pallas.

Flow:    kernel_tpu.py of every op -> [mosaic] -> jax.experimental.pallas

A kernel reads 16- and 8-bit arrays as 32-bit words through `pl.Ref.bitcast` and `reshape`, which the TPU interpreter
(jax 0.10 to 0.12) does not know; the functions that do so stand here, and read the same elements plainly where
`is_interpreted`. What is compiled is tested against a numpy model of words (tests/pallas_kernels/word_views.py).
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as _config
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Types of a kernel's references and DMAs, which Pallas does not export for annotations.
Ref = Any
Copy = Any

BOUNDS_CHECKS = "PALLAS_KERNELS_BOUNDS_CHECKS"  # variable of the environment
LANES = 128
SUBLANES = 8


def is_interpreted() -> bool:
    """Whether `pallas_call` is interpreted here: inside `pltpu.force_tpu_interpret_mode`."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def compiler_params(vmem_limit_bytes: int, grid_rank: int = 1) -> pltpu.CompilerParams:
    """Parameters of every kernel: grid steps in order, a limit of its own.

    Nobody checks the bounds of DMAs, which costs scalar work, unless the environment has `BOUNDS_CHECKS` at 1 where a
    kernel is traced: then a page id or slot out of range stops the chip with a message.
    """
    return pltpu.CompilerParams(
        dimension_semantics=[pltpu.ARBITRARY] * grid_rank,
        vmem_limit_bytes=min(vmem_limit_bytes, vmem_budget_bytes()),
        disable_bounds_checks=os.environ.get(BOUNDS_CHECKS) != "1",
    )


def vmem_budget_bytes() -> int:
    """VMEM that one kernel may ask for: 7/8 of the core's, since XLA keeps operands of its own there.

    64 MiB where the chip is unknown.
    """
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes // 8 * 7
    except (ValueError, NotImplementedError, RuntimeError):
        return 64 << 20


def matrix_unit_lanes() -> int:
    """Columns of the matrix unit of the chip that is compiled for; 256, as v6e has, where that is unknown."""
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except (ValueError, NotImplementedError, RuntimeError):  # no TPU, as where the kernel is interpreted
        return 256


def chip_name() -> str | None:
    """The chip that is compiled for, as "v6e" or "v7x"; None where there is none, as where kernels are interpreted."""
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except (ValueError, NotImplementedError, RuntimeError):
        return None
    return version if version.startswith("v") else f"v{version}"


def packing(dtype: jnp.dtype) -> int:
    """Elements of `dtype` in a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def load_row(ref: Ref, leading: tuple[Any, ...], first: jax.Array | int, count: int, row: jax.Array | int) -> jax.Array:
    """uint32[count, lanes]: row `row` of words of `ref[leading]` [n, rows, packing, lanes], of entries from `first` on.

    Rows of words are read with a stride of `rows`.
    """
    if is_interpreted():
        return _joined(ref[(*leading, pl.ds(first, count), row)])
    rows = ref.shape[-3]
    return _words(ref, leading)[pl.ds(first * rows + row, count, stride=rows), :]


def store_row(ref: Ref, row: int, value: jax.Array) -> None:
    """Stores uint32[n, lanes] as row `row` of words of `ref` [n, rows, packing, lanes]."""
    if is_interpreted():
        ref[:, row] = _split(value, ref.dtype)
    else:
        _words(ref, ())[pl.ds(row, ref.shape[0], stride=ref.shape[1]), :] = value


def elements(value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[n * packing, lanes] of words uint32[n, lanes], those of a word one below the other."""
    if is_interpreted():
        return _split(value, dtype).reshape(-1, value.shape[1])
    return pltpu.bitcast(value, dtype)


def joined(value: jax.Array) -> jax.Array:
    """Words uint32[n, lanes] of [n * packing, lanes]: what `elements` takes apart."""
    if is_interpreted():
        return _joined(value.reshape(-1, packing(value.dtype), value.shape[1]))
    return pltpu.bitcast(value, jnp.uint32)


def recast(value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The bits of `value` as numbers of a dtype of the same width."""
    return lax.bitcast_convert_type(value, dtype) if is_interpreted() else pltpu.bitcast(value, dtype)


def _words(ref: Ref, leading: tuple[Any, ...]) -> Ref:
    """`ref[leading]` [..., packing, lanes] as uint32[rows, lanes]; only where compiled."""
    view = ref.bitcast(jnp.uint32)
    view = view.at[leading] if leading else view
    return view.reshape(math.prod(view.shape[:-1]), view.shape[-1])


def _joined(x: jax.Array) -> jax.Array:
    """uint32[n, lanes] of [n, packing, lanes]; only where interpreted."""
    x = x.swapaxes(1, 2)
    return lax.bitcast_convert_type(x[..., 0] if x.shape[2] == 1 else x, jnp.uint32)


def _split(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[n, packing, lanes] of uint32[n, lanes]; only where interpreted."""
    x = lax.bitcast_convert_type(words, dtype)
    return x[:, None] if x.ndim == 2 else x.swapaxes(1, 2)

"""The one step of a page_ops kernel for TPU.

Flow:    runs of pages + source or zeros + target -> [run_once] -> the target, in place where it is an array
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.mosaic import Ref


class Refs(NamedTuple):
    """References of the one step."""

    runs: Ref  # SMEM int32[3 * n + 1] of `copy_runs`
    zeros: Ref | None  # part of a page
    source: Ref | None  # HBM [pages, ...]; None: the target itself
    target: Ref  # HBM [pages, ...]
    arrived: Ref  # DMA semaphore


def run_once(
    body: Callable[[Refs], None],
    runs: jax.Array,
    zeros: jax.Array | None,
    source: jax.Array | None,
    target: jax.Array | jax.ShapeDtypeStruct,
    *,
    name: str,
) -> jax.Array:
    """One step of `body`; `target` is updated in place where it is an array."""
    in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    return call(
        body,
        Refs,
        name=name,
        grid=1,
        scalars={"runs": runs},
        inputs={
            "zeros": None if zeros is None else Operand(zeros, in_vmem),
            "source": None if source is None else Operand(source, IN_HBM),
        },
        outputs={} if isinstance(target, jax.Array) else {"target": Operand(target, IN_HBM)},
        in_place={"target": target} if isinstance(target, jax.Array) else {},
        scratch={"arrived": pltpu.SemaphoreType.DMA},
        vmem_limit_bytes=8 << 20,
    )["target"]

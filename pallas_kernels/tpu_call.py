"""pallas_call of a TPU kernel whose references have names.

Flow:    scalars, inputs, outputs and scratch by name -> [call] -> results by name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic import compiler_params

IN_HBM = pl.BlockSpec(memory_space=pl.ANY)


class Operand(NamedTuple):
    """An array, or the shape of a result, and how the grid cuts it."""

    value: Any
    spec: pl.BlockSpec


def call(
    body: Callable[[SimpleNamespace], None],
    *,
    name: str,
    grid: jax.Array | int,
    scalars: Mapping[str, jax.Array],  # in scalar memory, and arguments of the index maps after the step
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    scratch: Mapping[str, Any],
    vmem_limit_bytes: int,
    in_place: Mapping[str, str] | None = None,  # input -> the output that is the same array
) -> dict[str, jax.Array]:
    """Runs `body(references)` for every step of the grid."""
    names = [*scalars, *inputs, *outputs, *scratch]
    order = [*scalars, *inputs]
    results = pl.pallas_call(
        lambda *refs: body(SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(grid,),
            in_specs=[operand.spec for operand in inputs.values()],
            out_specs=[operand.spec for operand in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[operand.value for operand in outputs.values()],
        input_output_aliases={order.index(a): list(outputs).index(b) for a, b in (in_place or {}).items()},
        compiler_params=compiler_params(vmem_limit_bytes),
        name=name,
    )(*scalars.values(), *(operand.value for operand in inputs.values()))
    return dict(zip(outputs, results, strict=True))

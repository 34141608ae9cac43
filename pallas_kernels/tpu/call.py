"""pallas_call of a TPU kernel whose references have names.

Flow:    scalars, inputs, outputs and scratch by name -> [call] -> results by name

Pages in slabs go in and come out as `SlabArray`s; the kernel has references as to arrays of their own (`slab_refs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.references import References, named
from pallas_kernels.tpu import slab_refs
from pallas_kernels.tpu.mosaic import compiler_params

IN_HBM = pl.BlockSpec(memory_space=pl.ANY)


class Operand(NamedTuple):
    """An array, or the shape of a result, and how the grid cuts it."""

    value: Any
    spec: pl.BlockSpec


def call(
    body: Callable[[References], None],
    references: type[References],  # a field for each name below
    *,
    name: str,
    grid: jax.Array | int | tuple[jax.Array | int, ...],
    scalars: Mapping[str, jax.Array | None],  # in scalar memory, and arguments of the index maps after the step
    inputs: Mapping[str, Any],  # of operands: an `Operand`, a NamedTuple of some, or None
    outputs: Mapping[str, Any],  # of operands
    vmem_limit_bytes: int,
    scratch: Mapping[str, Any] | None = None,  # memory and semaphores: one, a NamedTuple of some, or None
    in_place: Mapping[str, Any] | None = None,  # pages in HBM, changed: an array, or several; references and results
) -> dict[str, Any]:
    """Runs `body(references)` for every step of the grid; the outputs, and what was changed in place, by name.

    Raises:
        ValueError: the names are not those of `references`, see `references.named`.
    """
    scratch, in_place = scratch or {}, in_place or {}
    taken = {key: slab_refs.operand(x) for key, x in in_place.items()}
    changed = {key: jax.tree.map(_in_hbm, x) for key, x in taken.items()}
    _, referring = named(references, [scalars, inputs, outputs, changed, scratch], _is_operand)
    prefetched, given = jax.tree.leaves([*scalars.values()]), _operands(inputs)
    num_outputs, arrays_changed = len(_operands(outputs)), jax.tree.leaves([*taken.values()])
    results = _operands(outputs) + _operands(changed)
    first = len(prefetched) + len(given)  # of the arrays in place among what goes in
    values = [*prefetched, *(operand.value for operand in given)]
    sources = [*values, *[None] * num_outputs]  # of references but scratch
    sources += [part for x in in_place.values() for part in slab_refs.parts(x)]

    def kernel(*refs: Any) -> None:
        own = refs[:first] + refs[first + len(arrays_changed) :]  # of an array in place: the result's reference
        body(referring([slab_refs.seen_by_kernel(x, ref) for x, ref in zip_longest(sources, own)]))

    arrays = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid if isinstance(grid, tuple) else (grid,),
            in_specs=[operand.spec for operand in given] + [IN_HBM] * len(arrays_changed),
            out_specs=[operand.spec for operand in results],
            scratch_shapes=jax.tree.leaves([*scratch.values()]),
        ),
        out_shape=[operand.value for operand in results],
        input_output_aliases={first + i: num_outputs + i for i in range(len(arrays_changed))},
        compiler_params=compiler_params(vmem_limit_bytes, grid_rank=len(grid) if isinstance(grid, tuple) else 1),
        name=name,
    )(*map(slab_refs.operand, values), *arrays_changed)
    both = {**outputs, **changed}
    structure = jax.tree.structure([*both.values()], is_leaf=_is_operand)
    by_name = dict(zip(both, jax.tree.unflatten(structure, arrays), strict=True))
    return by_name | {key: slab_refs.written(x, by_name[key]) for key, x in in_place.items()}


def _in_hbm(x: jax.Array) -> Operand:
    return Operand(jax.ShapeDtypeStruct(x.shape, x.dtype), IN_HBM)


def _is_operand(x: Any) -> bool:
    return isinstance(x, Operand)


def _operands(by_name: Mapping[str, Any]) -> list[Operand]:
    return jax.tree.leaves([*by_name.values()], is_leaf=_is_operand)

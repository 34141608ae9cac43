"""A Mosaic GPU kernel whose references have names.

Flow:    inputs, outputs and scratch by name -> [call] -> results by name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.gpu import mosaic
from pallas_kernels.references import References, named


def call(
    body: Callable[[References], None],
    references: type[References],  # a field for each name below
    *,
    name: str,
    grid: dict[str, int],  # axis name -> size
    inputs: Mapping[str, Any],  # in global memory: an array, a NamedTuple of some, or None
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch: Mapping[str, Any] | None = None,  # shared memory and barriers: one, a NamedTuple of some, or None
    in_place: Mapping[str, jax.Array] | None = None,  # at most one array that the kernel changes: also a result
    num_warpgroups: int = 1,
) -> dict[str, Any]:
    """Runs `body(references)` in every thread block; the outputs, and what was changed in place, by name.

    Raises:
        ValueError: the names are not those of `references`, see `references.named`; or beside an array in place there
            is another, scratch, or more than one warpgroup.
        NotImplementedError: an axis other than the last exceeds what a CUDA grid has.
    """
    scratch, in_place = scratch or {}, in_place or {}
    _, referring = named(references, [inputs, in_place, outputs, scratch])
    given, shapes = jax.tree.leaves([*inputs.values()]), jax.tree.leaves([*outputs.values()])

    def run(*refs: Any) -> None:
        body(referring(refs))

    if not in_place:
        own = jax.tree.leaves([*scratch.values()])
        launch = mosaic.kernel(run, name=name, outputs=shapes, scratch=own, grid=grid, num_warpgroups=num_warpgroups)
        results, changed = launch(*given), {}
    elif len(in_place) > 1 or scratch or num_warpgroups > 1:
        raise ValueError(
            f"{name}: expected one array in place, no scratch and one warpgroup, got {list(in_place)}, scratch "
            f"{list(scratch)} and {num_warpgroups}"
        )
    else:
        (key, array), *_ = in_place.items()
        results, array = mosaic.kernel_in_place(run, name=name, outputs=shapes, grid=grid)(*given, array)
        changed = {key: array}
    structure = jax.tree.structure([*outputs.values()])
    return dict(zip(outputs, jax.tree.unflatten(structure, results), strict=True)) | changed

"""What can be compiled: (op, settings) -> a function, the shapes of its arguments, and which of them are donated.

Imported in the process that compiles, after `prepare_environment`. `slabs=N` among an op's settings puts its pages into
slabs of N pages (`lab.slab_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pallas_kernels.cases.case import argument_shapes
from scripts.lab import compiled
from scripts.lab.gpu import layer_case
from scripts.lab.slab_shapes import in_slabs, of_slabs

LAYERS = "layers"  # that share the plan of a step: no op, but compiled as one
_PAGE = 16  # tokens, where settings say nothing


class Operation(NamedTuple):
    """What one compilation compiles."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes
    donated: tuple[int, ...] = ()  # arguments that are updated in place: page arrays
    layers: int = 0  # layers in the module, each in the scopes of `layer_case`; 0: it is not made of layers


def case_of(op: str, settings: list[str]) -> Any:
    """The case of a compilation.

    Raises:
        ValueError: there is no such op, or the settings are not those of its cases.
    """
    if op == LAYERS:
        return layer_case.parse(settings)
    return compiled.case_of("gpu", op, settings, page=_PAGE)


def operation_of(op: str, settings: list[str]) -> Operation:
    """An op of pallas_kernels by its case, or several layers.

    Raises:
        ValueError: as `case_of`.
    """
    case = case_of(op, settings)
    if op == LAYERS:
        return Operation(*layer_case.layers(case), layers=1 if case.scan else case.layers)
    arguments = argument_shapes(case)
    if slabs := of_slabs(settings):
        arguments = in_slabs(arguments, packs=False, **slabs)
    return Operation(partial(case.call, "gpu"), tuple(arguments), donated=(0,) if case.writes else ())

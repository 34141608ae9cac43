"""What can be compiled: (op, settings) -> a function, the shapes of its arguments, and which of them are donated.

Imported in the process that compiles, after `prepare_environment`. `slabs=N` among an op's settings puts its pages into
slabs of N pages, `rest=ROWS` behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cases.case import argument_shapes
from pallas_kernels.layouts import cdiv
from pallas_kernels.slab_pages import ROW_BYTES, SlabColumn, places_of
from scripts.lab import compiled
from scripts.lab.gpu import layer_case

LAYERS = "layers"  # that share the plan of a step: no op, but compiled as one
_PAGE = 16  # tokens, where settings say nothing
_OF_SLABS = ("slabs", "rest")


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
    of_case = [setting for setting in settings if setting.partition("=")[0] not in _OF_SLABS]
    return compiled.case_of("gpu", op, of_case, page=_PAGE)


def operation_of(op: str, settings: list[str]) -> Operation:
    """An op of pallas_kernels by its case, or several layers.

    Raises:
        ValueError: as `case_of`.
    """
    case = case_of(op, settings)
    if op == LAYERS:
        return Operation(*layer_case.layers(case), layers=1 if case.scan else case.layers)
    pages, rest = argument_shapes(case)
    if of_slabs := {name: int(n) for name, _, n in (x.partition("=") for x in settings) if name in _OF_SLABS}:
        pages = _in_slabs(pages, of_slabs["slabs"], of_slabs.get("rest", 0))
    return Operation(partial(case.call, "gpu"), (pages, rest), donated=(0,) if case.writes else ())


def _in_slabs(pages: tuple[Any, ...], pages_per_slab: int, rest: int) -> SlabColumn:
    """The shape of a column of slabs that holds at least so many pages."""
    places = places_of([(page.shape[1:], page.dtype.name) for page in pages], pages_per_slab, packs=False)
    slabs = cdiv(pages[0].shape[0], pages_per_slab)
    rows = pages_per_slab * places[0].page_rows + rest
    return SlabColumn(jax.ShapeDtypeStruct((slabs, rows, ROW_BYTES // 4), jnp.uint32), places)  # type: ignore[arg-type]

"""The ops of pallas_kernels that are compiled ahead of time, by their cases.

Flow:    <op>/cases.py -> [compiled_types, shape_settings] -> settings -> a case -> [traced] -> function, shapes

Imports jax: after `prepare_environment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pallas_kernels.cases.case import Case, argument_shapes, settings_of, splits
from pallas_kernels.cases.find import case_types


def compiled_types(platform: str) -> dict[str, type[Case]]:
    """By the name of the op."""
    return {op: case_type for op, case_type in case_types().items() if platform in case_type.compiled}


def shape_settings(case_type: type[Case], num_shards: int) -> Iterator[tuple[str, list[str]]]:
    """(label, settings) of the model shapes that split into so many shards."""
    for shape in case_type.shapes:
        if splits(case_type, shape, num_shards):
            for label, sizes in case_type.to_compile(shape, num_shards):
                yield label, settings_of(sizes)


def traced(case: Case, backend: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call of the page arrays and the rest, and what stands for these."""
    return partial(case.call, backend), tuple(argument_shapes(case))

"""The ops of pallas_kernels that are compiled ahead of time, by their cases.

Flow:    <op>/cases.py -> [compiled_types, shape_settings] -> op, settings -> [case_of] -> a case

Imports jax: after `prepare_environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pallas_kernels.cases.case import Case, parse, settings_of, splits
from pallas_kernels.cases.find import case_types
from pallas_kernels.mask import MaskRule
from scripts.lab.slab_shapes import of_case


def compiled_types(platform: str) -> dict[str, type[Case]]:
    """By the name of the op."""
    return {op: case_type for op, case_type in case_types().items() if platform in case_type.compiled}


def case_of(platform: str, op: str, settings: list[str], **defaults: Any) -> Case:
    """The case of a compilation, whatever settings say of slabs (`slab_shapes`).

    `defaults` are set where the op has such a field and the settings say nothing.

    Raises:
        ValueError: there is no such op, or the settings are not those of its cases.
    """
    types = compiled_types(platform)
    if op not in types:
        raise ValueError(f"expected an op out of {sorted(types)}, got {op!r}")
    return parse(types[op], of_case(settings), platform=platform, **defaults)


def mask_of(op: str, settings: list[str]) -> MaskRule:
    """Who sees what in a case of attention."""
    return getattr(case_of("tpu", op, settings), "mask", MaskRule())


def shape_settings(case_type: type[Case], num_shards: int) -> Iterator[tuple[str, list[str]]]:
    """(label, settings) of the layers of models that split into so many shards."""
    for shape in case_type.shapes:
        if splits(case_type, shape, num_shards):
            for label, sizes in case_type.to_compile(shape, num_shards):
                yield label, settings_of(sizes)

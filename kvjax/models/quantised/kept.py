"""Projections of a model that stay in the eight bits that a checkpoint has them in.

Flow:    abstract model, sources of its parameters, tensors -> [keep_projections] -> the same with kernels and scales

Kept is what XLA multiplies: float8 and int8 without zero points, a projection a tensor. What else is quantised (experts
in one array, projections that share a tensor) is dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from kvjax.models.layers.linear import Linear
from kvjax.models.quantised.scaled import ScaledFloats, ScaledIntegers
from kvjax.models.quantised.scheme import DequantisedTensor, Shape
from kvjax.models.tensor_files import CheckpointTensor
from kvjax.models.tensor_sources import ParamPath, TensorSource, Whole


@dataclass(frozen=True)
class KeptTensor:
    """Numbers of eight bits, or the scales of their blocks."""

    name: str
    shape: Shape
    read: Callable[[], np.ndarray]
    problem: ClassVar[None] = None


def keep_projections(
    module: Any, sources: Mapping[ParamPath, TensorSource], tensors: Mapping[str, CheckpointTensor]
) -> tuple[dict[ParamPath, TensorSource], dict[str, CheckpointTensor]]:
    """Gives projections of an abstract model kernels of eight bits where `tensors` have such; sources and tensors then.

    Raises:
        ValueError: no projection can be kept.
    """
    new_sources, new_tensors = dict(sources), dict(tensors)
    for path, source in sources.items():
        layout = _kept_layout(_at(module, path[:-1]), path, source, tensors)
        if layout is None or not isinstance(source, Whole):
            continue
        outputs, inputs = layout.shape
        rows, columns = layout.block
        shape = (-(-outputs // rows), -(-inputs // columns))
        scale = f"{source.name}, its scale"
        new_tensors[source.name] = KeptTensor(source.name, layout.shape, layout.weight.read)
        new_tensors[scale] = KeptTensor(scale, shape, _in_shape(layout, shape))
        new_sources[(*path[:-1], "kernel_scale")] = Whole(scale, transposed=True)
        _at(module, path[:-1]).keep_quantised(
            jax.ShapeDtypeStruct((inputs, outputs), layout.weight.numpy_dtype),
            jax.ShapeDtypeStruct(shape[::-1], np.float32),
            (columns, rows),
        )
    if len(new_sources) == len(sources):
        raise ValueError(
            "expected projections in float8, or in int8 without zero points, to keep quantised, got none: load the "
            "model without keep_quantised"
        )
    return new_sources, new_tensors


def _kept_layout(
    owner: Any, path: ParamPath, source: TensorSource, tensors: Mapping[str, CheckpointTensor]
) -> ScaledFloats | ScaledIntegers | None:
    """How a parameter is stored that can stay so."""
    is_whole = isinstance(source, Whole) and source.transposed and source.shape is None
    if path[-1] != "kernel" or not is_whole or not isinstance(owner, Linear):
        return None
    tensor = tensors[source.names[0]]
    layout = tensor.layout if isinstance(tensor, DequantisedTensor) else None
    return layout if isinstance(layout, ScaledFloats | ScaledIntegers) and layout.is_plain else None


def _in_shape(layout: ScaledFloats | ScaledIntegers, shape: Shape) -> Callable[[], np.ndarray]:
    return lambda: layout.scales().reshape(shape)


def _at(module: Any, path: ParamPath) -> Any:
    for key in path:
        module = module[key] if isinstance(key, int) else getattr(module, key)
    return module


__all__ = ["KeptTensor", "keep_projections"]

"""What every way to store quantised weights has in common: tensors that belong together, and what they stand for.

Flow:    stored tensors by name -> [dequantised] -> the same with one tensor of floats in the place of each such group

A scheme names the tensors of a group by their roles ("packed", "scale", ...) and gives each group a layout, which
checks shapes and dtypes before anything is read.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from kvjax.errors import CheckpointError
from kvjax.models.tensor_files import StoredTensor

Shape: TypeAlias = tuple[int, ...]
Parts: TypeAlias = Mapping[str, StoredTensor]  # by role


class Misfit(ValueError):
    """Stored tensors that do not belong together; the message names one and says what was expected."""


class Layout(abc.ABC):
    """How one tensor is stored. Made by a scheme once the shapes and dtypes of all parts are known to fit."""

    shape: Shape  # of the tensor

    @abc.abstractmethod
    def dequantise(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The tensor in `dtype`, rounded once from float32; never more than one piece of it is in float32.

        Raises:
            CheckpointError: values that cannot be, such as a scale that is NaN.
        """


class Scheme(abc.ABC):
    """A way to store quantised weights, of a whole checkpoint. Immutable."""

    # Ends of names of stored tensors -> role, and the end of the name of the tensor that they are parts of.
    companions: ClassVar[Mapping[str, tuple[str, str]]]
    # One of these is in every group; where none is, the tensors are none of a quantised weight.
    carriers: ClassVar[frozenset[str]] = frozenset({"weight"})
    # Ends of names of tensors by which other stacks quantise activations or caches.
    unused: ClassVar[tuple[str, ...]] = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")

    @abc.abstractmethod
    def layout(self, name: str, parts: Parts) -> Layout:
        """How the tensor `name` is stored.

        Raises:
            Misfit: the parts do not belong together.
        """


@dataclass(frozen=True)
class DequantisedTensor:
    """A tensor that stands for a group, computed from it each time it is read."""

    name: str
    layout: Layout
    dtype: np.dtype[Any]
    problem: ClassVar[None] = None

    @property
    def shape(self) -> Shape:
        """Without reading anything."""
        return self.layout.shape

    def read(self) -> np.ndarray:
        """The tensor, in `dtype`."""
        return self.layout.dequantise(self.dtype)


@dataclass(frozen=True)
class MisfitTensor:
    """A tensor whose group does not belong together."""

    name: str
    problem: str
    shape: ClassVar[Shape] = ()

    def read(self) -> np.ndarray:
        """Never."""
        raise CheckpointError(f"{self.name}: {self.problem}")


Tensor: TypeAlias = StoredTensor | DequantisedTensor | MisfitTensor


def dequantised(scheme: Scheme, tensors: Mapping[str, StoredTensor], dtype: np.dtype[Any]) -> dict[str, Tensor]:
    """`tensors`, each group of the scheme as one tensor that is in `dtype` when it is read. Reads no weights."""
    groups = dict(_groups(scheme, tensors))
    members = {part.name for parts in groups.values() for part in parts.values()}
    result: dict[str, Tensor] = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.name not in members and not name.endswith(scheme.unused)
    }
    for name, parts in groups.items():
        try:
            result[name] = DequantisedTensor(name, scheme.layout(name, parts), dtype)
        except Misfit as error:
            result[name] = MisfitTensor(name, str(error))
    return result


def _groups(scheme: Scheme, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Names of tensors, with the parts that they are stored as."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        for end, (role, own_end) in scheme.companions.items():
            if name.endswith(end):
                groups.setdefault(name.removesuffix(end) + own_end, {})[role] = tensor
                break
    for name, parts in groups.items():
        if name in tensors:
            parts["weight"] = tensors[name]
        if scheme.carriers & parts.keys():
            yield name, parts


def part_of(parts: Parts, role: str, beside: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> StoredTensor:
    """The part of a role.

    Raises:
        Misfit: there is none, or it has another shape or dtype.
    """
    part = parts.get(role)
    if part is None:
        raise Misfit(f"expected a tensor with its {role} beside {parts[beside].name}, got none")
    if part.dtype not in dtypes:
        raise Misfit(f"expected {part.name} in {' or '.join(dtypes)}, got {part.dtype}")
    if shape is not None and part.shape != shape:
        raise Misfit(f"expected {part.name} of shape {shape} beside {parts[beside].name}, got {part.shape}")
    return part

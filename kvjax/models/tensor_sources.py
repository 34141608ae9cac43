"""Which tensors of a Hugging Face checkpoint each parameter is made of.

Flow:    module, parameter path -> [tensor_source] -> TensorSource -> names and shapes to check, then the parameter

A parameter's path is its tensor's name, but for its last element. A module whose tensors are otherwise says so:
`tensor_names` has the checkpoint's names of attributes ("": the attribute's tensors are named as its owner's), and
`checkpoint_sources()` gives a source by path within the module ("q_proj.kernel"), its names relative to the module.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

ParamPath: TypeAlias = tuple[Any, ...]  # such as ("layers", 0, "self_attn", "q_proj", "kernel")
Shape: TypeAlias = tuple[int, ...]

# Last element of a parameter's path -> last part of the tensor's name, and whether the tensor is transposed.
_LEAVES = {
    "kernel": ("weight", True),
    "bias": ("bias", False),
    "embedding": ("weight", False),
    "scale": ("weight", False),
}


class HasShape(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> Shape:
        """The shape of the tensor as it is stored."""


class TensorSource(abc.ABC):
    """How one parameter stands in a checkpoint."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tensors that it is made of."""

    @abc.abstractmethod
    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of each tensor, for a parameter of `param_shape`."""

    @abc.abstractmethod
    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """The parameter."""

    @abc.abstractmethod
    def split(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tensors, as `names`.

        Raises:
            NotImplementedError: the parameter is only a part of its tensor.
        """

    @abc.abstractmethod
    def under(self, rename: Callable[[str], str]) -> TensorSource:
        """The same with other names."""

    def chosen(self, tensors: Mapping[str, HasShape], param_shape: Shape) -> TensorSource:
        """The source to use of a checkpoint with these tensors: itself, unless it is one of several ways."""
        del tensors, param_shape
        return self

    def fits(self, tensors: Mapping[str, HasShape], param_shape: Shape) -> bool:
        """Whether all its tensors are there, of their shapes."""
        shapes = zip(self.names, self.shapes(param_shape), strict=True)
        return all(name in tensors and tensors[name].shape == shape for name, shape in shapes)


@dataclass(frozen=True)
class _OfOneTensor(TensorSource):
    """A parameter made of one tensor."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one."""
        return (self.name,)

    def under(self, rename: Callable[[str], str]) -> TensorSource:
        """The same under another name."""
        return replace(self, name=rename(self.name))


@dataclass(frozen=True)
class _PartOfTensor(_OfOneTensor):
    """A parameter that has its tensor together with others."""

    def split(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        """Never: the other parts are not known here."""
        raise NotImplementedError(f"expected a parameter with a tensor of its own, got a part of {self.name}")


@dataclass(frozen=True)
class Whole(_OfOneTensor):
    """One tensor: [out, in] where the parameter is [in, out] if `transposed`, or of another `shape` of equal size."""

    transposed: bool = False
    shape: Shape | None = None

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of the one tensor."""
        if self.shape is not None:
            return (self.shape,)
        return (_swapped(param_shape) if self.transposed else param_shape,)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """The tensor, transposed in its last two dimensions or in another shape."""
        (tensor,) = tensors
        return (np.swapaxes(tensor, -1, -2) if self.transposed else tensor).reshape(param_shape)

    def split(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        """The one tensor."""
        (shape,) = self.shapes(param.shape)
        return ((np.swapaxes(param, -1, -2) if self.transposed else param).reshape(shape),)


@dataclass(frozen=True)
class Part(_PartOfTensor):
    """Rows from `start` on of a tensor of `total` rows, where several projections are one tensor.

    Rows are along its dimension `axis`; the rest is the parameter's.
    """

    start: int
    total: int
    transposed: bool = True
    axis: int = 0

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of the whole tensor."""
        rows = _swapped(param_shape) if self.transposed else param_shape
        return ((*rows[: self.axis], self.total, *rows[self.axis + 1 :]),)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """The rows."""
        size = (_swapped(param_shape) if self.transposed else param_shape)[self.axis]
        rows = tensors[0][(*[slice(None)] * self.axis, slice(self.start, self.start + size))]
        return np.swapaxes(rows, -1, -2) if self.transposed else rows


@dataclass(frozen=True)
class Rows(_PartOfTensor):
    """The rows of these numbers, of a tensor of `total` rows where several projections lie in turns."""

    rows: tuple[int, ...]
    total: int
    transposed: bool = True

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of the whole tensor."""
        part = _swapped(param_shape) if self.transposed else param_shape
        return ((self.total, *part[1:]),)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """The rows."""
        del param_shape
        rows = tensors[0][np.asarray(self.rows)]
        return rows.T if self.transposed else rows


@dataclass(frozen=True)
class HeadPart(_PartOfTensor):
    """Rows from `start` on in every head's `rows_of_head` rows of a tensor: a parameter [heads, rows, in]."""

    start: int
    rows_of_head: int

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of the whole tensor."""
        return ((param_shape[0] * self.rows_of_head, param_shape[2]),)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """The rows."""
        heads = tensors[0].reshape(param_shape[0], self.rows_of_head, param_shape[2])
        return heads[:, self.start : self.start + param_shape[1]]


@dataclass(frozen=True)
class Stack(TensorSource):
    """A tensor for each index of the parameter's first dimension: those of experts."""

    names_of_parts: tuple[str, ...]
    transposed: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """One for each part."""
        return self.names_of_parts

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of each part."""
        part = param_shape[1:]
        return (_swapped(part) if self.transposed else part,) * len(self.names_of_parts)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """All parts on top of each other."""
        del param_shape
        stacked = np.stack(tensors)
        return np.swapaxes(stacked, -1, -2) if self.transposed else stacked

    def split(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        """The parts."""
        return tuple(part.T if self.transposed else part for part in param)

    def under(self, rename: Callable[[str], str]) -> TensorSource:
        """The same under other names."""
        return replace(self, names_of_parts=tuple(map(rename, self.names_of_parts)))


@dataclass(frozen=True)
class Joined(TensorSource):
    """Several tensors of so many rows each, one below the other: projections that are one parameter here."""

    names_of_parts: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each
    transposed: bool = True
    row_shape: Shape | None = None  # of a tensor; None: as the parameter's

    @property
    def names(self) -> tuple[str, ...]:
        """One for each part."""
        return self.names_of_parts

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shape of each part."""
        whole = _swapped(param_shape) if self.transposed else param_shape
        row = whole[1:] if self.row_shape is None else self.row_shape
        return tuple((size, *row) for size in self.sizes)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """All rows."""
        rows = np.concatenate(tensors)
        return (np.swapaxes(rows, -1, -2) if self.transposed else rows).reshape(param_shape)

    def split(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        """The parts."""
        rows = np.split(np.swapaxes(param, -1, -2) if self.transposed else param, np.cumsum(self.sizes)[:-1])
        return tuple(part.reshape(shape) for part, shape in zip(rows, self.shapes(param.shape), strict=True))

    def under(self, rename: Callable[[str], str]) -> TensorSource:
        """The same under other names."""
        return replace(self, names_of_parts=tuple(map(rename, self.names_of_parts)))


@dataclass(frozen=True)
class Either(TensorSource):
    """Several ways, of which checkpoints have one; the first where none is whole."""

    ways: tuple[TensorSource, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the first way."""
        return self.ways[0].names

    def shapes(self, param_shape: Shape) -> tuple[Shape, ...]:
        """The shapes of the first way."""
        return self.ways[0].shapes(param_shape)

    def join(self, tensors: Sequence[np.ndarray], param_shape: Shape) -> np.ndarray:
        """As the first."""
        return self.ways[0].join(tensors, param_shape)

    def split(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        """As the first."""
        return self.ways[0].split(param)

    def under(self, rename: Callable[[str], str]) -> TensorSource:
        """The same under other names."""
        return Either(tuple(way.under(rename) for way in self.ways))

    def chosen(self, tensors: Mapping[str, HasShape], param_shape: Shape) -> TensorSource:
        """The first way that fits, else the first whose tensors are all there, to say what is wrong with them."""
        there = [way for way in self.ways if all(name in tensors for name in way.names)]
        return next((way for way in there if way.fits(tensors, param_shape)), (there or self.ways)[0])


@runtime_checkable
class HasSources(Protocol):
    """A module whose parameters' tensors are not named as their paths."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """By path within the module, names relative to the module."""


def tensor_source(module: Any, path: ParamPath, prefix: str) -> TensorSource:
    """The source of the parameter of `module`, a whole model, at `path`; `prefix` stands before the names."""
    if path[0] in module.unprefixed:  # beside the one that is called "model"
        prefix = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
    node = module
    for depth, key in enumerate(path):
        if isinstance(node, HasSources):
            source = node.checkpoint_sources().get(".".join(map(str, path[depth:])))
            if source is not None:
                return source.under(prefix.__add__)
        if depth < len(path) - 1:
            name = getattr(node, "tensor_names", {}).get(key, key)
            prefix += "" if name == "" else f"{name}."
        node = node[key] if isinstance(key, int) else getattr(node, key)
    leaf, transposed = _LEAVES.get(str(path[-1]), (str(path[-1]), False))
    return Whole(prefix + leaf, transposed)


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])

"""The numpy inputs of a step in one buffer: each array that goes to a device costs the host some microseconds.

Flow:    DeviceBatch, sampling inputs (numpy) -> [PackedInputs.pack] -> int32[n], large arrays -> jitted step
         -> [PackedInputs.unpack] -> the same trees of jax arrays

Where each array lies depends on the shapes alone, so on the bucket: unpacking is static slices of the step's program.
Each begins at a multiple of `ALIGNMENT` numbers.
Arrays of four bytes a number go in as they are, booleans as int32. By themselves go those of another size, and those
so large (block tables of many requests) that a second copy costs more than an array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.tables.given_arrays import own_copy

_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")
ALIGNMENT = 64  # numbers: XLA gives a kernel for GPUs a slice of the buffer as it lies, which has to begin at 256 bytes
OWN_BYTES = 1 << 16  # arrays from here on go by themselves: to copy so many bytes takes as long as to pass an array

# The tree, and shape and dtype of each array: all that a layout depends on.
Shapes: TypeAlias = tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]]


class Packed(NamedTuple):
    """One step's inputs as the program takes them. Never written again."""

    buffer: np.ndarray  # int32[n]
    own: tuple[np.ndarray, ...]  # arrays that go by themselves


@dataclass(frozen=True)
class _Place:
    """Where one array lies."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int | None  # in the buffer; None: it goes by itself

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def filling(self) -> np.ndarray:  # int32[n]
        """What lies between it and the next one."""
        return np.zeros(_aligned(self.size) - self.size, np.int32)


class PackedInputs:
    """The layout of trees of one structure and shape. Immutable."""

    def __init__(self, shapes: Shapes) -> None:
        self._tree, arrays = shapes
        places, end = [], 0
        for shape, dtype in arrays:
            size = math.prod(shape)
            packed = is_packed(size, dtype)
            places.append(_Place(shape, dtype, end if packed else None))
            end += _aligned(size) if packed else 0
        self._places = tuple(places)
        # Which arrays are packed, whether one is a row of int32 already, and what fills up behind it; which go by
        # themselves.
        self._packed = [
            (
                i,
                len(place.shape) == 1 and place.dtype == np.int32,
                np.zeros(_aligned(place.size) - place.size, np.int32),
            )
            for i, place in enumerate(places)
            if place.start is not None
        ]
        self._own = [i for i, place in enumerate(places) if place.start is None]

    def pack(self, leaves: Sequence[np.ndarray]) -> Packed:
        """Copies of the arrays of a tree, in `jax.tree.leaves`' order; large read-only ones go as they are."""
        parts: list[np.ndarray] = []
        for i, is_plain, filling in self._packed:
            parts += (leaves[i] if is_plain else _as_int32(leaves[i]), filling)
        buffer = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return Packed(buffer, tuple([own_copy(leaves[i]) for i in self._own]))

    def unpack(self, buffer: jax.Array, own: Sequence[jax.Array]) -> Any:
        """The tree, while tracing."""
        left = iter(own)
        return jax.tree.unflatten(
            self._tree,
            [next(left) if place.start is None else _as_array(buffer, place) for place in self._places],
        )


def _aligned(size: int) -> int:
    """Numbers from the start of one array to that of the next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_packed(size: int, dtype: np.dtype) -> bool:
    """Whether an array of so many numbers goes into the buffer."""
    return (dtype.itemsize == 4 or dtype.kind == "b") and size * 4 < OWN_BYTES


def shapes_of(tree: Any) -> tuple[list[np.ndarray], Shapes]:
    """The numpy arrays of `tree`, and what their layout depends on."""
    leaves, structure = jax.tree.flatten(tree)
    return leaves, (structure, tuple(map(_SHAPE_AND_DTYPE, leaves)))


def _as_int32(leaf: np.ndarray) -> np.ndarray:  # int32[size]
    """The bits of an array, booleans as 0 and 1."""
    if leaf.dtype.kind == "b":
        leaf = leaf.astype(np.int32)
    return leaf.ravel().view(np.int32)


def _as_array(buffer: jax.Array, place: _Place) -> jax.Array:
    """What `_as_int32` made int32 of, from its place."""
    assert place.start is not None
    values = buffer[place.start : place.start + place.size].reshape(place.shape)
    if place.dtype.kind == "b":
        return values != 0
    return values if place.dtype == np.int32 else jax.lax.bitcast_convert_type(values, jnp.dtype(place.dtype))


__all__ = ["OWN_BYTES", "Packed", "PackedInputs", "Shapes", "is_packed", "shapes_of"]

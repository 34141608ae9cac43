"""Two layouts that several schemes share: floats of few bits times scales, and integers less zero points times scales.

Flow:    a scheme -> [ScaledFloats, ScaledIntegers] -> what `Scheme.layout` gives
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.errors import CheckpointError
from kvjax.models.quantised.bits import float4, float8, unpack
from kvjax.models.quantised.grid import Grid, block_of, read_scale
from kvjax.models.quantised.scheme import Layout, Misfit, Parts, Shape, part_of
from kvjax.models.tensor_files import StoredTensor

FLOAT8 = ("F8_E4M3", "F8_E5M2")
FLOAT4 = ("I8", "U8")  # two a byte


@dataclass(frozen=True)
class ScaledFloats(Layout):
    """Floats of eight or four bits, [..., out, in], and a scale for each block of the last two dimensions."""

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    shape: Shape
    divisor: StoredTensor | None = None  # of all scales
    is_in_dtype_of_scale: bool = False  # the product is rounded to that first

    @property
    def is_plain(self) -> bool:
        """Whether it is one matrix of eight-bit floats."""
        return self.weight.dtype in FLOAT8 and len(self.shape) == 2

    def scales(self) -> np.ndarray:  # float32 of the shape that they are stored in
        """What numbers are multiplied by."""
        scales = read_scale(self.scale)
        return scales if self.divisor is None else scales / read_scale(self.divisor).reshape(())

    def dequantise(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The product."""
        rows, columns = self.shape[-2:]
        grid = Grid(block_of(rows, self.block[0]), block_of(columns, self.block[1]))
        scales = self.scales().reshape(-1, -(-rows // self.block[0]), -(-columns // self.block[1]))
        stored = self.weight.read()
        matrices = stored.reshape(-1, *stored.shape[-2:])
        floats = float8 if self.weight.dtype in FLOAT8 else lambda part: float4(part.view(np.uint8))
        through = self.scale.numpy_dtype if self.is_in_dtype_of_scale else None
        products = (
            grid.product(lambda part, matrix=matrix: floats(matrix[part]), scale, None, dtype, through)  # type: ignore[misc]
            for matrix, scale in zip(matrices, scales, strict=True)
        )
        if len(matrices) == 1:
            return next(products).reshape(self.shape)
        out = np.empty((len(matrices), rows, columns), dtype)
        for i, product in enumerate(products):
            out[i] = product
        return out.reshape(self.shape)


def floats_of(parts: Parts, role: str, beside: str, dtypes: tuple[str, ...]) -> tuple[StoredTensor, Shape]:
    """The part with the floats, and the shape of the tensor that it stands for.

    Raises:
        Misfit: there is none, or it is no matrix.
    """
    weight = part_of(parts, role, beside, dtypes)
    if len(weight.shape) < 2:
        raise Misfit(f"expected {weight.name} of two dimensions or more, got shape {weight.shape}")
    *outer, rows, columns = weight.shape
    return weight, (*outer, rows, 2 * columns if weight.dtype in FLOAT4 else columns)


@dataclass(frozen=True)
class ScaledIntegers(Layout):
    """Integers [rows, columns], and for each block of them a scale and a zero point; they may be packed in words.

    Products are rounded to the dtype of the scales first, as the libraries compute them that write such checkpoints.
    """

    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None  # None: all are `middle`
    groups: StoredTensor | None  # of each index along `group_axis`; None: as `block` says
    block: tuple[int, int]
    shape: Shape  # of the tensor; of what is stored the reverse where `is_transposed`
    num_bits: int  # of a packed number; 0: none is packed
    packed_axis: int  # of the numbers
    zero_axis: int  # of packed zero points
    middle: int  # what a packed number of that many bits means by zero
    zero_shift: int = 0  # added to a zero point as it is stored, of as many bits as numbers have
    order: tuple[int, ...] | None = None  # where a number of a word is to stand; None: as it is
    group_axis: int = 1
    is_transposed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is a matrix of bytes without zero points, in blocks."""
        return not self.num_bits and self.zero is None and self.groups is None and not self.is_transposed

    def scales(self) -> np.ndarray:  # float32 of the shape that they are stored in
        """What numbers are multiplied by."""
        return read_scale(self.scale)

    def dequantise(self, dtype: np.dtype[Any]) -> np.ndarray:
        """`(number - zero) * scale`."""
        rows, columns = self.shape[::-1] if self.is_transposed else self.shape
        num_scales = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        scale = self.scales().reshape(num_scales)
        grid = self._grid(rows, columns, num_scales)
        zero = self._zero_points(num_scales)
        stored = self.weight.read()
        per_word = 32 // self.num_bits if self.num_bits else 1

        def numbers(part: slice) -> np.ndarray:
            if not self.num_bits:
                return stored[part].astype(np.float32)
            if self.packed_axis == 1:
                return self._unpacked(stored[part], 1)[:, :columns].astype(np.float32)
            first, last = part.start // per_word, -(-part.stop // per_word)
            offset = part.start - first * per_word
            words = self._unpacked(stored[first:last], 0)
            return words[offset : offset + part.stop - part.start].astype(np.float32)

        out = grid.product(numbers, scale, zero, dtype, self.scale.numpy_dtype)
        return out.T if self.is_transposed else out

    def _unpacked(self, words: np.ndarray, axis: int) -> np.ndarray:
        numbers = unpack(words, self.num_bits, axis)
        if self.order is None:
            return numbers
        by_word = numbers.reshape(*numbers.shape[:-1], -1, len(self.order))
        return by_word[..., list(self.order)].reshape(numbers.shape)

    def _zero_points(self, num_scales: tuple[int, int]) -> np.ndarray | None:  # float32[R, C]
        if self.zero is None:
            return None if self.middle == 0 else np.full((num_scales[0], 1), self.middle, np.float32)
        stored = self.zero.read()
        if not self.num_bits:
            return stored.reshape(num_scales).astype(np.float32)
        numbers = self._unpacked(stored, self.zero_axis)[: num_scales[0], : num_scales[1]].astype(np.int32)
        return ((numbers + self.zero_shift) & ((1 << self.num_bits) - 1)).astype(np.float32)

    def _grid(self, rows: int, columns: int, num_scales: tuple[int, int]) -> Grid:
        maps = [block_of(rows, self.block[0]), block_of(columns, self.block[1])]
        if self.groups is not None:
            groups = self.groups.read().astype(np.int64)
            bad = np.flatnonzero((groups < 0) | (groups >= num_scales[self.group_axis]))
            if bad.size:
                raise CheckpointError(
                    f"{self.groups.name}: expected groups in [0, {num_scales[self.group_axis]}), got {groups[bad[0]]} "
                    f"at {bad[0]}, one of {bad.size} out of range: the file is damaged"
                )
            maps[self.group_axis] = groups
        return Grid(maps[0], maps[1])


__all__ = ["FLOAT4", "FLOAT8", "ScaledFloats", "ScaledIntegers", "floats_of"]

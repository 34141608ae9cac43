"""Scales and zero points of blocks of a matrix, and the product in pieces that bound what is in float32.

Flow:    values, scale[R, C], zero[R, C] -> [Grid] -> (values - zero) * scale, in the dtype that is asked for

A row and a column of a matrix say by two maps which row and column of `scale` they have, so that blocks, groups,
channels and groups in an order of their own are one thing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.errors import CheckpointError
from kvjax.models.quantised.bits import power_of_two
from kvjax.models.quantised.scheme import Misfit
from kvjax.models.tensor_files import StoredTensor

PIECE = 1 << 18  # numbers in float32 at a time, which caches hold


def in_pieces(
    shape: tuple[int, ...], dtype: np.dtype[Any], piece_of: Callable[[slice], np.ndarray]
) -> np.ndarray:  # [shape] in `dtype`
    """An array made of what `piece_of` gives for its rows, a few at a time."""
    out = np.empty(shape, dtype)
    rows = max(1, PIECE // max(1, int(np.prod(shape[1:]))))
    for first in range(0, shape[0], rows):
        part = slice(first, min(first + rows, shape[0]))
        with np.errstate(over="ignore", invalid="ignore"):
            out[part] = piece_of(part)
    return out


def block_of(size: int, block: int) -> np.ndarray:  # intp[size]
    """The block of each of `size` rows or columns, the last block may be cut off."""
    return np.arange(size) // block


@dataclass(frozen=True)
class Grid:
    """Which scale an element of a matrix has."""

    rows: np.ndarray  # intp[num_rows] of the row of `scale`
    columns: np.ndarray  # intp[num_columns] of its column

    def spread(self, values: np.ndarray, part: slice) -> np.ndarray:  # [R, C] -> what broadcasts over [rows, columns]
        """The value of each element of the matrix's rows of `part`."""
        own = values[self.rows[part]]
        return own if values.shape[1] == 1 or self._has_own_columns else own[:, self.columns]

    @functools.cached_property
    def _has_own_columns(self) -> bool:
        return np.array_equal(self.columns, np.arange(len(self.columns)))

    def product(
        self,
        values_of: Callable[[slice], np.ndarray],  # rows -> float32[rows, num_columns], written over
        scale: np.ndarray,  # float32[R, C]
        zero: np.ndarray | None,  # float32[R, C]
        dtype: np.dtype[Any],
        through: np.dtype[Any] | None = None,
    ) -> np.ndarray:  # [num_rows, num_columns] in `dtype`
        """`(values - zero) * scale`, first rounded to `through` where that is not None."""

        def piece(part: slice) -> np.ndarray:
            values = values_of(part)
            if zero is not None:
                values -= self.spread(zero, part)
            values *= self.spread(scale, part)
            return values if through is None or through == values.dtype else values.astype(through)

        return in_pieces((len(self.rows), len(self.columns)), dtype, piece)


def check_blocks(scale: StoredTensor, shape: tuple[int, ...], block: tuple[int, int]) -> None:
    """Checks that `scale` has a number for each block of the last two dimensions of a tensor of `shape`.

    Raises:
        Misfit: it has another shape.
    """
    *outer, rows, columns = shape
    expected = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    is_one = math.prod(expected) == math.prod(scale.shape) == 1
    is_vector = block[1] >= columns and not outer and scale.shape == expected[:1]
    if scale.shape != expected and not is_one and not is_vector:
        raise Misfit(
            f"expected {scale.name} of shape {expected}, for blocks of {block[0]} x {block[1]} in {shape}, got "
            f"{scale.shape}"
        )


def read_scale(part: StoredTensor, role: str = "scale") -> np.ndarray:  # float32 of its shape
    """The numbers of a tensor of scales; bytes are exponents (E8M0).

    Raises:
        CheckpointError: one of them is NaN or infinite.
    """
    stored = part.read()
    values = power_of_two(stored.view(np.uint8)) if part.dtype in ("U8", "F8_E8M0") else stored.astype(np.float32)
    bad = values.size - int(np.count_nonzero(np.isfinite(values)))
    if bad:
        raise CheckpointError(
            f"{part.name}: expected finite numbers as {role}, got {bad} of {values.size} that are NaN or infinite: the "
            "file is damaged"
        )
    return values


__all__ = ["PIECE", "Grid", "block_of", "check_blocks", "in_pieces", "read_scale"]

"""Vectors that stand for tokens: a buffer of rows on the device, which a step reads where a prompt has placeholders.

Flow:    embeddings of a request (numpy) + row ids -> [EmbedBuffer.write] -> array [rows, dim] -> update step -> model

The number of rows is fixed, so a step with images and one without are the same program. Rows are written in pieces of
one length, by a program of their own that donates the buffer; a step in flight reads what was there when it was
dispatched.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.device.mesh.placement import Placement
from kvjax.device.mesh.transfers import hands_over

PIECE = 256  # rows written at once


class EmbedBuffer:
    """The rows of one engine, whole on every device of its placement. Owned by one thread.

    `array` is [num_rows, dim], and another array after each write.
    """

    def __init__(self, num_rows: int, dim: int, dtype: str, placement: Placement) -> None:
        """Zeros.

        Raises:
            ValueError: there are no rows or no numbers in one.
        """
        if num_rows < 1 or dim < 1:
            raise ValueError(f"expected at least one row of at least one number, got {num_rows} and {dim}")
        zeros = jax.jit(lambda: jnp.zeros((num_rows, dim), dtype), out_shardings=placement.replicated)
        self.array: jax.Array = zeros()
        self._piece = min(PIECE, num_rows)

    def write(self, row_ids: np.ndarray, values: np.ndarray) -> None:  # int[n] distinct, [n, dim]
        """Puts `values` into the rows; a dispatch for each piece.

        Raises:
            ValueError: a row is outside the buffer, or there are other values than one for each. Nothing is written.
        """
        num_rows, dim = self.array.shape
        if values.shape != (row_ids.size, dim):
            raise ValueError(f"expected values [{row_ids.size}, {dim}], got {list(values.shape)}")
        if row_ids.size and (row_ids.min() < 0 or row_ids.max() >= num_rows):
            raise ValueError(f"expected rows in [0, {num_rows}), got {row_ids.min()} to {row_ids.max()}")
        for start in range(0, row_ids.size, self._piece):
            piece = slice(start, start + self._piece)
            self._write_piece(row_ids[piece], values[piece])

    def warmup(self) -> None:
        """Compiles the program that writes; the rows stay as they are."""
        self._write_piece(np.zeros(0, np.int32), np.zeros((0, self.array.shape[1]), np.float32))

    @hands_over
    def _write_piece(self, row_ids: np.ndarray, values: np.ndarray) -> None:
        ids = np.full(self._piece, self.array.shape[0], np.int32)  # rows behind the last are not written
        padded = np.zeros((self._piece, values.shape[1]), np.float32)
        ids[: row_ids.size], padded[: row_ids.size] = row_ids, values
        self.array = _written(self.array, ids, padded)


@partial(jax.jit, donate_argnums=0)
def _written(array: jax.Array, row_ids: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[row_ids].set(values.astype(array.dtype), mode="drop")


__all__ = ["EmbedBuffer"]

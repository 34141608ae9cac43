"""Rows of vectors on the device: each write changes its rows alone, whatever their number, and compiles nothing new."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.device import EmbedBuffer, Placement, count_compilations
from kvjax.device.encoder.embed_buffer import PIECE


def values(seed: int, count: int, dim: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


@pytest.mark.parametrize("num_rows", [5, PIECE, 2 * PIECE + 9])
def test_a_write_changes_its_rows_alone(num_rows: int) -> None:
    """The model: an array of numpy. Rows in any order, none, one, or all of them."""
    buffer, model = EmbedBuffer(num_rows, 3, "float32", Placement.create()), np.zeros((num_rows, 3), np.float32)
    buffer.warmup()
    rng = np.random.default_rng(0)
    with count_compilations() as count:
        for seed, size in enumerate([0, 1, num_rows // 2, num_rows]):
            rows, new = rng.permutation(num_rows)[:size], values(seed, size)
            model[rows] = new
            buffer.write(rows, new)
            np.testing.assert_array_equal(buffer.array, model)
    assert count.num_programs == 0


def test_rows_are_in_the_buffers_dtype() -> None:
    buffer = EmbedBuffer(4, 3, "bfloat16", Placement.create())
    buffer.write(np.array([2]), np.full((1, 3), 1.0001, np.float32))
    assert buffer.array.dtype == "bfloat16"
    assert buffer.array[2].tolist() == [1.0] * 3


def test_what_cannot_be_written_is_refused_and_nothing_is() -> None:
    with pytest.raises(ValueError, match="expected at least one row of at least one number, got 0 and 3"):
        EmbedBuffer(0, 3, "float32", Placement.create())
    buffer = EmbedBuffer(4, 3, "float32", Placement.create())
    for rows, new, message in (
        ([0, 4], values(0, 2), r"expected rows in \[0, 4\), got 0 to 4"),
        ([-1], values(0, 1), r"expected rows in \[0, 4\), got -1 to -1"),
        ([0], values(0, 2), r"expected values \[1, 3\], got \[2, 3\]"),
        ([0], values(0, 1, dim=4), r"expected values \[1, 3\], got \[1, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.write(np.array(rows), new)
    assert not np.asarray(buffer.array).any()

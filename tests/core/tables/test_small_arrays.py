"""The answers are numpy's, for few elements and for many."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.tables.small_arrays import FEW, any_true, count_true, largest

SIZES = (1, 2, FEW - 1, FEW, FEW + 1, 1_000)


@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_flags_are_counted(size: int, share: float) -> None:
    flags = np.random.default_rng(size).random(2 * size)[::2] < share
    assert any_true(flags) == flags.any()
    assert count_true(flags) == flags.sum()


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_is_found(size: int) -> None:
    values = np.random.default_rng(size).integers(-9, 9, size).astype(np.int32)
    assert largest(values) == values.max()
    assert type(largest(values)) is int

"""The answers are numpy's, for few elements and for many."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.tables.small_arrays import FEW, all_ones, any_true, count_true

SIZES = (1, 2, FEW - 1, FEW, FEW + 1, 1_000)


@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_flags_are_counted(size: int, share: float) -> None:
    flags = np.random.default_rng(size).random(2 * size)[::2] < share
    assert any_true(flags) == flags.any()
    assert count_true(flags) == flags.sum()


@pytest.mark.parametrize("size", [0, *SIZES])
def test_ones_are_told_from_all_else(size: int) -> None:
    """Every second of the values, so that the array is no whole one."""
    values = np.ones(2 * size, np.int32)[::2]
    assert all_ones(values)
    for other in (0, 2, -1, 257, 1 << 24):
        for place in (0, size // 2, size - 1):
            changed = values.copy()
            changed[place : place + 1] = other
            assert all_ones(changed) == (size == 0)

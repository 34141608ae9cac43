"""How close results are to what is expected.

Flow:    arrays, expected arrays -> [excess, largest_difference] -> numbers
                                 -> [assert_close, assert_same] -> AssertionError
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Largest difference relative to the largest value of an array, by its dtype. The last: of an LSE whose weights were
# rounded before they were summed.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3, "bfloat16 weights": 2e-3}
_OTHERS = 2e-2


def excess(got: Any, expected: Any) -> float:
    """Largest difference over the arrays of two trees, in units of the tolerance: right up to 1."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max((_excess(a, b, TOLERANCE.get(str(b.dtype), _OTHERS)) for a, b in pairs), default=0.0)


def largest_difference(got: Any, expected: Any) -> tuple[float, float]:
    """(difference, tolerance) of the array of two trees that is worst by its tolerance; integers have none."""
    found = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        tolerance = 0.0 if np.issubdtype(a.dtype, np.integer) else TOLERANCE.get(str(a.dtype), _OTHERS)
        found.append((_difference(a, b), tolerance))
    return max(found, key=lambda one: one[0] / (one[1] or 1e-9), default=(0.0, 0.0))


def assert_close(got: Any, expected: Any) -> None:
    """Arrays of a tree are as close to those expected as the dtype of what was got holds numbers; integers are equal.

    Raises:
        AssertionError: one is not, or has another shape.
    """
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if np.issubdtype(a.dtype, np.integer):
            assert_same(a, b)
            continue
        assert_close_as(str(a.dtype), a, b)


def assert_close_as(dtype: str, got: Any, expected: Any) -> None:
    """An array is as close to the one expected as `dtype` holds numbers.

    Raises:
        AssertionError: it is not, or has another shape.
    """
    assert got.shape == expected.shape, f"expected shape {expected.shape}, got {got.shape}"
    found = _excess(got, expected, TOLERANCE.get(dtype, _OTHERS))
    assert found <= 1, f"an array of {got.dtype}{got.shape} is {found:.3g} tolerances off"


def assert_heads_close(got: Any, expected: Any, lse_as: str = "float32") -> None:
    """(out, LSE) are close head by head, the second axis: a huge sink of one would hide what is wrong in others.

    `lse_as`: the tolerance of the LSE.

    Raises:
        AssertionError: they are not.
    """
    for head in range(expected[0].shape[1]):
        assert_close_as(str(got[0].dtype), got[0][:, head], expected[0][:, head])
        assert_close_as(lse_as, got[1][:, head], expected[1][:, head])


def assert_same(got: Any, expected: Any) -> None:
    """Arrays of a tree are those expected bit for bit, but that any NaN is another.

    Raises:
        AssertionError: one is not, or has another shape or dtype.
    """
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(a), np.asarray(b)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"expected {y.dtype}{y.shape}, got {x.dtype}{x.shape}"
        both_nan = np.isnan(x.astype(np.float32)) & np.isnan(y.astype(np.float32))
        differs = (x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")) & ~both_nan
        assert not differs.any(), f"{int(differs.sum())} numbers of {x.dtype}{x.shape} differ"


def _excess(got: Any, expected: Any, tolerance: float) -> float:
    return _difference(got, expected) / tolerance


def _difference(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest value where that is above 1."""
    a, b = (np.asarray(x).astype(np.float64) for x in (got, expected))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        worst = float(np.abs(a[~same] - b[~same]).max())
    return worst / scale if np.isfinite(worst) else float("inf")

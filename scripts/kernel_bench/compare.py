"""How far results are from those of the reference.

The limits are those of the kernels' tests.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Largest difference relative to the largest value of an array, by its dtype; pages are copies of what was written.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def excess(got: Any, expected: Any) -> float:
    """Largest difference over the arrays of two trees, in units of the tolerance: right up to 1."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max((_excess(a, b) for a, b in pairs), default=0.0)


def _excess(got: Any, expected: Any) -> float:
    tolerance = TOLERANCE.get(str(expected.dtype), 2e-2)
    a, b = (np.asarray(x).astype(np.float32) for x in (got, expected))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
    worst = float(np.abs(a[~same] - b[~same]).max())
    return worst / scale / tolerance if np.isfinite(worst) else float("inf")

"""KV writes of numbers beyond the range of a dtype."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write


@pytest.mark.parametrize(
    ("dtype", "largest", "nan"),
    [("float8_e4m3fn", 448.0, np.nan), ("float8_e5m2", 57344.0, np.nan), ("int8", 127.0, 0.0)],
)
def test_short_dtypes_saturate(dtype: str, largest: float, nan: float) -> None:
    """Beyond the range comes the largest finite value, infinities too; NaN stays, or is 0 where there is none."""
    values = jnp.array([[[1e9, -1e9, jnp.inf, -jnp.inf, jnp.nan, 2.5, -3.5, largest]]])
    pages = (jnp.zeros((3, 4, 1, 8), dtype),) * 2
    got = kv_write(values, values, pages, jnp.array([5], jnp.int32))
    stored = np.asarray(got[0][1, 1, 0]).astype(np.float32)
    smallest = -128.0 if dtype == "int8" else -largest
    halves = [2.0, -4.0] if dtype == "int8" else [2.5, -3.5]
    np.testing.assert_array_equal(stored, [largest, smallest, largest, smallest, nan, *halves, largest])

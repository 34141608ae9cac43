"""Random numbers of every dtype that pages have, on the device and in numpy, and how pages round them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_ELEMENTS = 1 << 20  # random numbers drawn on the host; a larger array repeats them
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


def one_of(rng: np.random.Generator, levels: Sequence[Any]) -> Any:
    """A level, as it is."""
    return levels[int(rng.integers(len(levels)))]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers (int8: times 40) on the default device; the rows of a large array repeat."""
    row = int(np.prod(shape[1:], dtype=np.int64))
    rows = max(1, min(shape[0], BLOCK_ELEMENTS // max(1, row)))
    values = rng.standard_normal((rows, *shape[1:]), dtype=np.float32)
    if dtype == "int8":
        values = np.clip(np.rint(40 * values), -127, 127)
    return repeated(jnp.asarray(values).astype(dtype), shape[0])


def repeated(block: jax.Array, count: int) -> jax.Array:
    """`count` rows: those of `block` over and over."""
    rows = block.shape[0]
    return block if rows == count else block[jnp.arange(count) % rows]


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal values in `dtype`; int8 in [-127, 127]."""
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def hard_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, with some beyond the range of 8 bits, and what is not finite."""
    x = random_values(rng, shape, dtype)
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, 6)] = np.array([np.nan, np.inf, -np.inf, 1e9, -1e9, 0.5]).astype(x.dtype)
    return x


def hidden(dtype: Any) -> np.ndarray:
    """What stands where nobody may look: NaN; int8 has none: 127."""
    return np.array(127 if dtype == np.int8 else np.nan).astype(dtype)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 numbers as pages hold them: the nearest, beyond the range of 8 bits the largest; NaN in int8 is 0."""
    if dtype == np.int8:
        return np.clip(np.rint(np.nan_to_num(x, nan=0.0, posinf=127, neginf=-128)), -128, 127).astype(np.int8)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        x = np.where(np.isnan(x), x, np.clip(x, -limit, limit))
    with np.errstate(over="ignore"):  # beyond the range of 16 bits is infinity
        return x.astype(np.float32).astype(dtype)

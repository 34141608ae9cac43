"""A model that is traced once too often is seen, and only inside the block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.device.traces import at_most_traced


class Twice(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


def test_one_trace_too_many_fails() -> None:
    step = jax.jit(lambda x: Twice()(x))
    with at_most_traced(Twice, 2):
        for size in (3, 4, 3):
            step(jnp.zeros(size))
        with pytest.raises(AssertionError, match="traced > 2 times"):
            step(jnp.zeros(5))
    step(jnp.zeros(6))


def test_blocks_count_apart() -> None:
    for _ in range(2):
        with at_most_traced(Twice, 1):
            jax.jit(lambda x: Twice()(x))(jnp.zeros(3))

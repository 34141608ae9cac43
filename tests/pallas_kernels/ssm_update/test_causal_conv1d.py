"""Laws of causal convolution over states in pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import Step, on_device
from pallas_kernels.ssm_update import SsmOutput, causal_conv1d
from tests.pallas_kernels.cases import random_values

NUM_TOKENS, CHANNELS = 24, 6


@functools.cache
def jitted(activation: str | None) -> Callable[..., SsmOutput]:
    return jax.jit(functools.partial(causal_conv1d, activation=activation, backend="reference"))


@pytest.mark.parametrize("chunks", [[1] * 24, [2, 1, 13, 8], [3, 0, 21]], ids=str)
def test_chunks_equal_the_whole_bit_for_bit(chunks: Sequence[int]) -> None:
    """One sequence over a page of NaN, from step to step in the same page."""
    rng = np.random.default_rng(0)
    x = random_values(rng, (NUM_TOKENS, CHANNELS), "float32")
    weight = random_values(rng, (CHANNELS, 4), "float32")

    def in_steps(counts: Sequence[int]) -> tuple[np.ndarray, jax.Array]:
        states = jnp.full((3, CHANNELS, 3), jnp.nan).at[0].set(0)
        outs, done = [], 0
        for count in counts:
            new = np.full_like(x, 7)
            new[:count] = x[done : done + count]
            step = Step(*(np.array(y, np.int32) for y in ([0, count], [0, 0, 1], [2], [2])), np.array([done > 0]))
            result = jitted("silu")(new, states, weight, *on_device(step))
            states, done = result.states, done + count
            outs.append(result.out[:count])
        return np.concatenate(outs), states

    out, states = in_steps(chunks)
    chex.assert_trees_all_equal((out, states), in_steps([NUM_TOKENS]), strict=True)
    np.testing.assert_array_equal(states[2], x[-3:].T)

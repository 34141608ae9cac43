"""Causal convolution over states in pages against a loop over tokens, and its laws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ssm_update import SsmOutput, causal_conv1d
from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.ssm_update.ssm_cases import assert_states, conv_oracle
from tests.pallas_kernels.state_cases import Step, on_device, random_states, random_step

NUM_TOKENS, NUM_ROWS, NUM_PAGES, CHANNELS = 24, 5, 30, 6
LENGTHS = ([1, 1, 1], [0, 1, 2, 17, 3], [], [1, 0, 4, 5, 1], [24])


@functools.cache
def jitted(activation: str | None) -> Callable[..., SsmOutput]:
    return jax.jit(functools.partial(causal_conv1d, activation=activation, backend="reference"))


@pytest.mark.parametrize(
    ("taps", "dtype", "has_bias", "activation", "num_kept"),
    [
        (4, "float32", True, "silu", 1),
        (2, "bfloat16", False, None, 1),
        (4, "bfloat16", True, "silu", 2),
        (3, "float32", False, "silu", 5),
    ],
)
def test_random_steps(taps: int, dtype: str, has_bias: bool, activation: str | None, num_kept: int) -> None:
    """Lengths 0 and 1 and shorter than the state, in place and elsewhere, NaN in all pages that nobody starts from."""
    for seed, q_lens in enumerate(LENGTHS):
        rng = np.random.default_rng(seed)
        step = random_step(rng, q_lens, NUM_ROWS, NUM_PAGES, num_kept)
        x = random_values(rng, (NUM_TOKENS, CHANNELS), dtype)
        x[step.query_start_loc[-1] :] = np.nan
        states = random_states(rng, step, (CHANNELS, taps - 1), NUM_PAGES, dtype)
        weight = random_values(rng, (CHANNELS, taps), "float32")
        bias = random_values(rng, (CHANNELS,), "float32") if has_bias else None
        got = jitted(activation)(x, states, weight, *on_device(step), bias=bias)
        out, after = conv_oracle(x, states, weight, bias, activation == "silu", step)
        assert_close(got.out, out, dtype, "out")
        assert got.out.dtype == x.dtype
        assert_states(np.asarray(got.states), after, states, step, 0.0)


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


def test_states_are_updated_in_place() -> None:
    """The states' array is aliased to the result, and no temporary is as large."""
    states = jax.ShapeDtypeStruct((1000, 64, 3), jnp.float32)
    step = random_step(np.random.default_rng(0), [1, 1, 5], 3, NUM_PAGES)
    arrays = (jnp.zeros((8, 64)), states, jnp.zeros((64, 4)), *on_device(step))
    compiled = jax.jit(causal_conv1d, donate_argnums=1).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 1000 * 64 * 3 * 4
    assert memory.temp_size_in_bytes < 1000 * 64 * 3 * 4

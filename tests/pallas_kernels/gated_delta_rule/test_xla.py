"""The vectorised XLA path of gated_delta_rule against numpy's recurrence, NaN wherever nobody may look."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import gated_delta_rule, xla_rule
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.gated_delta_rule.delta_cases import INPUTS, Shape

LENGTHS = ([1, 1, 0, 1, 1], [1, 1, 1, 9], [12], [])


@pytest.mark.parametrize(
    ("shape", "trip_bytes"),
    [
        (Shape(num_tokens=12), 1 << 8),
        (Shape(is_per_channel=True, num_tokens=12, num_kept=3, num_pages=30, dtype="bfloat16"), 1 << 20),
        (Shape(num_tokens=12, state_dtype="bfloat16", use_qk_l2norm=False), 1 << 20),
    ],
    ids=str,
)
def test_random_steps(shape: Shape, trip_bytes: int) -> None:
    """Decode in one and several trips, beside longer sequences, drafts with pages of their own, no sequence."""
    options = Options(shape.scale, shape.use_qk_l2norm)
    run = jax.jit(functools.partial(xla_rule.gated_delta_rule, options=options, trip_bytes=trip_bytes))
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = shape.make(np.random.default_rng(seed), q_lens)
        inputs = Inputs(*(jnp.asarray(arrays[name]) for name in INPUTS))
        given = StepArrays(*map(jnp.asarray, step)).by_column()
        shape.assert_right(run(inputs, jnp.asarray(arrays["states"]), given), arrays, step)


def test_the_op_takes_this_path_by_name() -> None:
    """backend="xla" on CPU."""
    shape = Shape(num_tokens=12)
    arrays, step = shape.make(np.random.default_rng(9), [1, 1, 3])
    given = (*(jnp.asarray(arrays[name]) for name in (*INPUTS, "states")), *map(jnp.asarray, step))
    result = gated_delta_rule(*given, scale=shape.scale, use_qk_l2norm=True, backend="xla")
    shape.assert_right(result, arrays, step)

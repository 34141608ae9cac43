"""The vectorised XLA path of gated_delta_rule against numpy's recurrence, NaN wherever nobody may look."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import on_device
from pallas_kernels.gated_delta_rule import gated_delta_rule, xla_rule
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.cases import DeltaCase
from pallas_kernels.gated_delta_rule.oracle import INPUTS
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.gated_delta_rule.test_gated_delta_rule import small

LENGTHS = ([1, 1, 0, 1, 1], [1, 1, 1, 9], [12], [])


@pytest.mark.parametrize(
    ("shape", "trip_bytes"),
    [
        (small(tokens=12), 1 << 8),
        (small(per_channel=1, tokens=12, kept=3, num_pages=30, q_dtype="bfloat16"), 1 << 20),
        (small(tokens=12, state_dtype="bfloat16", l2norm=0), 1 << 20),
    ],
    ids=str,
)
def test_random_steps(shape: DeltaCase, trip_bytes: int) -> None:
    """Decode in one and several trips, beside longer sequences, drafts with pages of their own, no sequence."""
    assert_right(shape, LENGTHS, trip_bytes)


def test_checkpoints_are_left_on_the_way() -> None:
    """Within chunks of 32 tokens, beside drafts and decode rows."""
    assert_right(small(tokens=90, checkpoints=3, kept=3, num_pages=50), ([1, 1, 2, 70], [40, 3, 40]), 1 << 20)


def assert_right(shape: DeltaCase, lengths: Sequence[Sequence[int]], trip_bytes: int) -> None:
    """Steps of such lengths are what the oracle says."""
    options = Options(shape.scale, bool(shape.l2norm))
    run = jax.jit(functools.partial(xla_rule.gated_delta_rule, options=options, trip_bytes=trip_bytes))
    for seed, q_lens in enumerate(lengths):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        inputs = Inputs(*(jnp.asarray(arrays[name]) for name in INPUTS))
        given = StepArrays(*on_device(step)).by_column()
        shape.assert_step(run(inputs, jnp.asarray(arrays["states"]), given), arrays, step)


def test_the_op_takes_this_path_by_name() -> None:
    """backend="xla" on CPU."""
    shape = small(tokens=12)
    arrays, step = shape.step(np.random.default_rng(9), [1, 1, 3])
    given = (*(jnp.asarray(arrays[name]) for name in (*INPUTS, "states")), *on_device(step))
    result = gated_delta_rule(*given, scale=shape.scale, use_qk_l2norm=True, backend="xla")
    shape.assert_step(result, arrays, step)

"""The vectorised XLA path of mla_paged_attention against the float64 oracle, NaN wherever unseen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.mla_paged_attention import mla_paged_attention, xla_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_right, every_level, pairwise, static_of
from tests.pallas_kernels.mla_paged_attention.mla_cases import Shape, make_case
from tests.pallas_kernels.mla_paged_attention.test_mla_paged_attention import FACTORS, MORE_FACTORS
from tests.pallas_kernels.ragged_paged_attention.test_xla_attention import SMALL

ROWS = ([(1, 1), (0, 0), (1, 40), (17, 30), (5, 5)], [(1, 0), (3, 2), (17, 16)], None)
_CASES = pairwise(FACTORS)


@pytest.mark.parametrize(
    "case",
    [
        *(_CASES[index] for index in every_level(_CASES)),
        *(pytest.param(case, marks=pytest.mark.sweep) for case in pairwise(MORE_FACTORS, seed=2)),
    ],
    ids=str,
)
def test_random_steps(case: dict[str, Any]) -> None:
    """All features; decode, prefill and mixed, queries before position 0."""
    shape = Shape(num_q_heads=case["heads"], q_dtype=case["q_dtype"], latent=LatentShape(**case["cache"]))
    scale = np.float32(0.02 if case["cache"].get("dtype") == "int8" else 1.5)
    sinks = np.array([2.0, -np.inf, 50.0])[: case["heads"]] if case["sinks"] else None
    options = Options(**case["mask"], soft_cap=case["soft_cap"], sinks=sinks, k_scale=scale, v_scale=scale)
    static = static_of(options) | {"page_size": shape.latent.page_size, "limits": SMALL}
    run = jax.jit(functools.partial(xla_attention.mla_paged_attention, **static))
    for seed, rows in enumerate(ROWS):
        made = make_case(seed, shape, rows, options)
        assert_right(run(*made.arrays), made.expected(options), shape.q_dtype)


def test_the_op_takes_this_path_by_name() -> None:
    """backend="xla" on CPU, with the limits that ship."""
    case = make_case(3, Shape(), ROWS[0], Options())
    result = mla_paged_attention(*case.arrays, sm_scale=0.125, return_lse=True, backend="xla")
    assert_right(result, case.expected(Options()), "float32")

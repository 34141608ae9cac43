"""The Triton kernels of mla_paged_attention, interpreted, against the float64 oracle, NaN wherever unseen."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.mla_paged_attention import mla_paged_attention, xla_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_right, static_of
from tests.pallas_kernels.mla_paged_attention.mla_cases import Shape, make_case
from tests.pallas_kernels.ragged_paged_attention.test_triton import LANES, WHOLE

ROWS = [(1, 1), (0, 0), (1, 40), (17, 30), (5, 5)]
SINKS = np.array([2.0, -np.inf, 50.0, 0.0], np.float32)
CASES = [
    (LatentShape(), Options(sliding_window=9, soft_cap=1.5), LANES),
    (LatentShape(dtype="int8"), Options(k_scale=0.02, v_scale=0.02), WHOLE),
    (LatentShape(platform="tpu", dtype="bfloat16", page_size=6), Options(num_sink_tokens=2, sliding_window=4), LANES),
]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_every_feature(index: int) -> None:
    """Decode, prefill and mixed; packed pages of the TPU's layout, too, since a state lies in one row of them."""
    latent, options, limits = CASES[index]
    shape = Shape(latent=latent)
    static = static_of(options) | {"page_size": shape.latent.page_size, "by_triton": limits}
    run = jax.jit(functools.partial(xla_attention.mla_paged_attention, **static))
    case = make_case(index, shape, ROWS, options)
    assert_right(run(*case.arrays), case.expected(options), shape.q_dtype)


def test_the_op_takes_this_path_by_name() -> None:
    """backend="triton" on CPU, with the limits that ship; with sinks."""
    options = Options(sinks=SINKS[: Shape().num_q_heads])
    case = make_case(3, Shape(), ROWS, options)
    given = {"sm_scale": options.sm_scale, "sinks": options.sinks, "return_lse": True}
    result = mla_paged_attention(*case.arrays, **given, backend="triton")
    assert_right(result, case.expected(options), "float32")

"""Steps planned as decoding alone, by the reference: the same numbers as without a plan, and no loop over prefills."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_paged_attention as mla
from pallas_kernels import ragged_paged_attention as ragged
from pallas_kernels.decode_step import DecodeStep
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import Case, Shape, assert_close, make_case

OPTIONS = Options(sliding_window=9, num_sink_tokens=2, sinks=(0.5, -1.0, 0.0, 2.0))
MASK = MaskRule(True, 9, None, 2)


def run(case: Case, schedule: Any) -> Any:
    options = {"sinks": jnp.asarray(OPTIONS.sinks, jnp.float32), "sm_scale": OPTIONS.sm_scale}
    options |= {"sliding_window": 9, "num_sink_tokens": 2, "return_lse": True, "backend": "reference"}
    return ragged.ragged_paged_attention(*case.arrays, **options, schedule=schedule)


@pytest.mark.parametrize("page_size", [4, 32], ids=["in place", "gathered"])
def test_a_planned_decode_equals_the_oracle(page_size: int) -> None:
    """Fewer sequences than rows; what stands in the queries of the others is not looked at."""
    shape = Shape(num_tokens=5, num_rows=5, num_columns=12, page_size=page_size)
    for seed, rows in ((1, [(1, 40), (1, 1), (1, 17)]), (2, [(1, 3)] * 5), (3, [])):
        case = make_case(seed, shape, rows, OPTIONS)
        case.q[len(rows) :] = np.nan
        schedule = ragged.plan(*case.arrays, MASK, is_decode=True, backend="reference")
        result = run(case, schedule)
        out, lse = case.expected(OPTIONS)
        assert_close(result.out, out, shape.q_dtype, "out")
        assert_close(result.lse, lse, "float32", "lse")


def test_a_planned_decode_has_one_loop() -> None:
    shape = Shape(num_tokens=5, num_rows=5, num_columns=12, page_size=4)
    case = make_case(1, shape, [(1, 40)] * 5, OPTIONS)
    with_plan, without = (
        str(jax.make_jaxpr(lambda s=s: run(case, s))()).count("while[") for s in (DecodeStep(5), None)
    )
    assert (with_plan, without) == (1, 3)  # tiles of prompts, and KV tiles of each


def test_latents_are_planned_alike() -> None:
    rng = np.random.default_rng(0)
    q_nope, q_pe = (jnp.asarray(rng.normal(size=(3, 4, dim)), jnp.float32) for dim in (8, 4))
    pages = (jnp.asarray(rng.normal(size=(6, 4, 12)), jnp.float32),)
    tables = jnp.asarray([[1, 2], [3, 4], [0, 0]], jnp.int32)
    step = (tables, *(jnp.asarray(x, jnp.int32) for x in ([5, 8, 0], [0, 1, 2, 2], [2, 2, 2])))
    schedule = mla.plan(q_nope, q_pe, pages, *step, MaskRule(), is_decode=True, backend="reference")
    assert schedule == DecodeStep(3)
    planned, plain = (
        mla.mla_paged_attention(
            q_nope, q_pe, pages, *step, sm_scale=0.3, return_lse=True, backend="reference", schedule=one
        )
        for one in (schedule, None)
    )
    np.testing.assert_array_equal(planned.out, plain.out)
    np.testing.assert_array_equal(planned.lse, plain.lse)


def test_a_plan_of_another_size_is_refused() -> None:
    case = make_case(1, Shape(num_tokens=5, num_rows=5, num_columns=12, page_size=4), [(1, 40)] * 5, OPTIONS)
    with pytest.raises(ValueError, match=r"expected schedule None or DecodeStep\(num_tokens=5\), .* got DecodeStep"):
        run(case, DecodeStep(4))

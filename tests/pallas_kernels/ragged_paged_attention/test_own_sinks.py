"""Sink tokens of each sequence's own, as R-SWA has them: every backend against the float64 oracle, NaN where unseen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.limits import SMALL_PROGRAMS, SMALL_TRIPS
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import (
    kernel_gpu,
    kernel_tpu,
    plan,
    ragged_paged_attention,
    xla_attention,
)
from pallas_kernels.ragged_paged_attention.hard_steps import Case, Shape, make_case
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels.cases import assert_close

SMALL = Shape(num_tokens=40, num_rows=5, num_columns=18, page_size=4)
ON_TPU = dataclasses.replace(
    SMALL, num_columns=22, page_size=16, head_dim=128, q_dtype="bfloat16", kv_dtype="bfloat16", platform="tpu"
)
ON_GPU = dataclasses.replace(SMALL, page_size=16, head_dim=64, q_dtype="bfloat16", kv_dtype="bfloat16")
TILES_TPU = kernel_tpu.Tuning(queries=8, decode_block=128, tile_block=128)
TILES_GPU = kernel_gpu.Tuning(decode_block=64, decode_stages=2, num_blocks=3, prefill_block=64, prefill_stages=2)


def runner(backend: str, window: int) -> tuple[Shape, Callable[[Case, Any], Any]]:
    """The shape of a backend's steps, and (case, sink tokens) -> (out, lse) by its kernel."""
    shape = {"tpu": ON_TPU, "gpu": ON_GPU}.get(backend, SMALL)
    given = {"num_kv_heads": shape.num_kv_heads, "sm_scale": 0.125, "soft_cap": None, "sinks": None}
    given |= {"k_scale": None, "v_scale": None, "mask": MaskRule(sliding_window=window, sinks_by_sequence=True)}
    example = (*make_case(0, shape, []).arrays, jnp.zeros(shape.num_rows, jnp.int32))

    def call(kernel: Any, **own: Any) -> Callable[..., Any]:
        return lambda *arrays: kernel(*arrays[:-1], sink_tokens=arrays[-1], **given, **own)

    if backend == "tpu":
        run = compile_on_tpu(call(kernel_tpu.ragged_paged_attention, return_lse=True, tuning=TILES_TPU), *example)
    elif backend == "gpu":
        run = compile_on_gpu(call(kernel_gpu.ragged_paged_attention, return_lse=True, tuning=TILES_GPU), *example)
    elif backend in ("xla", "triton"):
        own = {"limits": SMALL_TRIPS} if backend == "xla" else {"by_triton": SMALL_PROGRAMS}
        run = jax.jit(call(xla_attention.ragged_paged_attention, **own))
    else:
        of_op = {"sm_scale": 0.125, "sliding_window": window, "return_lse": True, "backend": backend}
        run = jax.jit(lambda *x: ragged_paged_attention(*x[:-1], num_sink_tokens=x[-1], **of_op)[:2])
    return shape, lambda case, sinks: run(*case.arrays, jnp.array(sinks, jnp.int32))


def assert_right(result: Any, case: Case, options: Options) -> None:
    """Weights of bfloat16 are rounded before they are summed."""
    expected = case.expected(options)
    is_short = case.shape.q_dtype == "bfloat16"
    assert_close(result[0], expected[0], case.shape.q_dtype, "out")
    assert_close(result[1], expected[1], "bfloat16 weights" if is_short else "float32", "lse")


STEPS = {  # (query length, sequence length) and sink tokens of each sequence
    "decode": ([(1, 60), (1, 60), (1, 61), (1, 9), (1, 1)], (0, 30, 52, 60, 1)),
    "answers computed again": ([(17, 70), (9, 9), (14, 50)], (40, 3, 36, 0, 0)),
    "mixed": ([(1, 70), (1, 71), (20, 33), (18, 18)], (11, 64, 20, 18, 0)),
}


@pytest.mark.parametrize("window", [20, *[pytest.param(window, marks=pytest.mark.sweep) for window in (1, 7)]])
@pytest.mark.parametrize("backend", ["reference", "xla", "tpu", "gpu"])
def test_a_query_sees_its_own_sequences_prompt_and_a_window(backend: str, window: int) -> None:
    """Prompts that end inside pages, before and inside the window, and behind the sequence."""
    shape, run = runner(backend, window)
    scale = 4 if backend in ("tpu", "gpu") else 1
    for seed, (rows, sinks) in enumerate(STEPS.values()):
        longer = [(q_len, n * scale - (scale > 1) if n > q_len else n) for q_len, n in rows]
        sinks = tuple(num * scale for num in sinks)
        options = Options(sliding_window=window, num_sink_tokens=sinks)
        case = make_case(seed, shape, longer, options)
        assert_right(run(case, sinks), case, options)


def test_equal_numbers_give_the_bits_of_a_number_for_all() -> None:
    options = Options(sliding_window=7, num_sink_tokens=11)
    case = make_case(3, SMALL, [(1, 60), (17, 70), (9, 9)], options)
    of_op = {"sm_scale": 0.125, "sliding_window": 7, "return_lse": True, "backend": "reference"}
    alike = ragged_paged_attention(*case.arrays, num_sink_tokens=11, **of_op)
    own = ragged_paged_attention(*case.arrays, num_sink_tokens=np.full(5, 11, np.int32), **of_op)
    np.testing.assert_allclose(alike.out, own.out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(alike.lse, own.lse, rtol=2e-6, atol=2e-6)


def test_a_planned_step_has_the_same_result() -> None:
    rows, sinks = STEPS["decode"]
    options = Options(sliding_window=7, num_sink_tokens=sinks)
    shape = dataclasses.replace(SMALL, num_tokens=5)
    case = make_case(1, shape, rows, options)
    q, pages, *step = case.arrays
    mask = MaskRule(sliding_window=7, sinks_by_sequence=True)
    given = jnp.array(sinks, jnp.int32)
    schedule = plan(q, pages, *step, mask, sink_tokens=given, is_decode=True, backend="reference")
    of_op = {"sm_scale": 0.125, "sliding_window": 7, "return_lse": True, "backend": "reference"}
    result = ragged_paged_attention(q, pages, *step, num_sink_tokens=given, schedule=schedule, **of_op)
    assert_right((result.out, result.lse), case, options)


WRONG = {
    "shape": (np.zeros(4, np.int32), r"expected num_sink_tokens \[num_seqs\] of shape \(5\), got \(4,\)"),
    "dtype": (np.zeros(5, np.float32), "expected num_sink_tokens of dtype int32, got float32"),
    "negative": (np.full(5, -1, np.int32), "expected num_sink_tokens >= 0, got"),
}


@pytest.mark.parametrize(("sinks", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arrays_are_refused(sinks: np.ndarray, message: str) -> None:
    case = make_case(1, SMALL, [(1, 9)])
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*case.arrays, num_sink_tokens=sinks, sm_scale=1.0, sliding_window=4)


def test_a_plan_gets_an_array_where_its_mask_says_so() -> None:
    q, pages, *step = make_case(1, SMALL, [(1, 9)]).arrays
    call = functools.partial(plan, q, pages, *step)
    with pytest.raises(ValueError, match="expected sink_tokens=None of a mask without sinks_by_sequence"):
        call(MaskRule(sliding_window=4), sink_tokens=jnp.zeros(5, jnp.int32))
    with pytest.raises(ValueError, match="expected num_sink_tokens=0 beside sinks_by_sequence, got 2"):
        call(MaskRule(sliding_window=4, num_sink_tokens=2, sinks_by_sequence=True), sink_tokens=jnp.zeros(5, jnp.int32))

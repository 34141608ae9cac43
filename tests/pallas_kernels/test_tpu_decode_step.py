"""Steps planned as decoding alone, by the TPU kernels: right, and with no launch of tiles in the program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_paged_attention as mla
from pallas_kernels import ragged_paged_attention as ragged
from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.decode_step import DecodeStep
from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.tpu.memory import pallas_calls
from tests.pallas_kernels.cases import Case, Shape, assert_close, make_case
from tests.pallas_kernels.mla_paged_attention import mla_cases

OPTIONS = Options(sliding_window=70, num_sink_tokens=2, sinks=(0.5, -1.0, 0.0, 2.0))
MASK = MaskRule(True, 70, None, 2)
KV = Shape(5, 5, 12, 16, kv_dtype="bfloat16", q_dtype="bfloat16", head_dim=128, platform="tpu")
LATENT = mla_cases.Shape(5, 5, 12, 4, q_dtype="bfloat16", latent=LatentShape(32, 16, "bfloat16", "tpu"))
ROWS = ([(1, 190), (1, 1), (1, 17)], [(1, 3)] * 5, [])


def planned_as(op: Any, is_decode: bool, **sizes: Any) -> Callable[..., Any]:
    """(arrays of a case) -> (out, lse) of a step planned in the same program."""
    options = {"sliding_window": 70, "num_sink_tokens": 2, "sm_scale": OPTIONS.sm_scale, "return_lse": True, **sizes}
    run = functools.partial(getattr(op, op.__name__.rpartition(".")[2]), **options, backend="tpu")

    def call(*arrays: Any) -> Any:
        schedule = op.plan(*arrays, MASK, **sizes, is_decode=is_decode, backend="tpu")
        assert schedule == (DecodeStep(5) if is_decode else None)
        return run(*arrays, sinks=jnp.asarray(OPTIONS.sinks, jnp.float32), schedule=schedule)[:2]

    return call


KINDS: dict[str, tuple[Any, dict[str, int], Callable[..., Any], Any]] = {
    "heads": (ragged, {"num_kv_heads": 2}, make_case, KV),
    "latents": (mla, {"page_size": 16}, mla_cases.make_case, LATENT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_decode_equals_the_oracle(kind: str) -> None:
    """Of fewer sequences than rows, NaN in the queries of the others, whatever `distribution` calls the sequences."""
    op, sizes, make, shape = KINDS[kind]
    run = compile_on_tpu(planned_as(op, is_decode=True, **sizes), *make(0, shape, [], OPTIONS).arrays)
    for seed, rows in enumerate(ROWS):
        case: Case = make(seed, shape, rows, OPTIONS)
        case.q[len(rows) :] = np.nan
        as_prefills = dataclasses.replace(case, distribution=np.array([0, len(rows), len(rows)], np.int32))
        for called in (case, as_prefills):
            out, lse = run(*called.arrays)
            expected = case.expected(OPTIONS)
            assert_close(out, expected[0], shape.q_dtype, "out")
            assert_close(lse, expected[1], "bfloat16 weights", "lse")


@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_decode_is_one_launch(kind: str) -> None:
    op, sizes, make, shape = KINDS[kind]
    arrays = make(0, shape, [], OPTIONS).arrays
    programs = (jax.make_jaxpr(planned_as(op, is_decode, **sizes))(*arrays).jaxpr for is_decode in (True, False))
    assert [len(list(pallas_calls(program))) for program in programs] == [1, 2]


def test_a_schedule_of_another_backend_is_refused() -> None:
    arrays = make_case(0, KV, [], OPTIONS).arrays
    with pytest.raises(ValueError, match="expected schedule None or DecodeStep"):
        ragged.ragged_paged_attention(*arrays, num_kv_heads=2, sm_scale=1.0, schedule=(), backend="tpu")

"""The Triton kernels of ragged_paged_attention, interpreted, against the float64 oracle, NaN wherever unseen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import xla_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.triton.walks import Limits
from tests.pallas_kernels.cases import Shape, assert_right, make_case, static_of

LANES = Limits(programs=6, few_tiles=0, most_keys=16)  # several KV tiles and pieces
WHOLE = Limits(programs=1, few_tiles=100)
ROWS = [(1, 30), (1, 1), (17, 40), (5, 5)]
SINKS = np.array([1e30, -1e30, -np.inf, 2.0], np.float32)
CASES = [
    (Shape(), Options(), LANES),
    (Shape(), Options(), WHOLE),
    (Shape(q_dtype="bfloat16", kv_dtype="bfloat16"), Options(sliding_window=9, num_sink_tokens=2, sinks=SINKS), LANES),
    (Shape(head_dim=40, head_dim_v=24, page_size=5), Options(attention_chunk_size=16, soft_cap=1.5), LANES),
    (Shape(num_q_heads=6, num_kv_heads=1, kv_dtype="float8_e4m3fn"), Options(k_scale=0.5, v_scale=2.0), LANES),
    (Shape(kv_dtype="float8_e5m2", q_dtype="bfloat16"), Options(causal=False), WHOLE),
    (Shape(kv_dtype="int8", head_dim=128), Options(k_scale=0.02, v_scale=0.02), LANES),
]


def compiled(shape: Shape, options: Options, limits: Limits) -> Callable[..., Any]:
    """The kernels for steps of one shape."""
    v_scale = None if options.v_scale is None else jnp.asarray(options.v_scale, jnp.float32)
    static = static_of(options) | {"num_kv_heads": shape.num_kv_heads, "v_scale": v_scale, "by_triton": limits}
    return jax.jit(functools.partial(xla_attention.ragged_paged_attention, **static))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_every_feature(index: int) -> None:
    """Decode, prefill and mixed; sequences of fewer tokens than queries; none."""
    shape, options, limits = CASES[index]
    run = compiled(shape, options, limits)
    blind = [(1, 0), (2, 1), (3, 3), (5, 2)]
    for seed, rows in enumerate((ROWS, [], blind if options.causal else ROWS)):
        rows = [row for row, _ in zip(rows, range(shape.num_rows), strict=False)]
        while sum(q_len for q_len, _ in rows) > shape.num_tokens:
            rows.pop()
        case = make_case(100 * index + seed, shape, rows, options)
        assert_right(run(*case.arrays), case.expected(options), shape.q_dtype)

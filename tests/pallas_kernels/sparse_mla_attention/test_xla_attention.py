"""The vectorised XLA path of sparse_mla_attention against the float64 oracle, NaN wherever unnamed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.sparse_mla_attention import xla_attention
from pallas_kernels.token_places import EntryTiles
from tests.pallas_kernels.cases import assert_right, every_level, pairwise
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Shape, make_case
from tests.pallas_kernels.sparse_mla_attention.test_kernel_tpu import arguments, op_of
from tests.pallas_kernels.sparse_mla_attention.test_sparse_mla_attention import FACTORS, MORE_FACTORS

ROWS = (None, [(1, 1), (0, 0), (1, 150), (17, 130), (5, 5)])
_CASES = pairwise(FACTORS)


@pytest.mark.parametrize(
    "case",
    [
        *(_CASES[index] for index in every_level(_CASES)),
        *(pytest.param(case, marks=pytest.mark.sweep) for case in pairwise(MORE_FACTORS, seed=2)),
    ],
    ids=str,
)
def test_random_steps(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All features, in tiles that tokens and entries exceed."""
    monkeypatch.setattr(xla_attention, "tiles_for", lambda q: EntryTiles(7, 11))
    shape = Shape(num_q_heads=case["heads"], q_dtype=case["q_dtype"], **case["kind"], **case["cache"])
    sinks = np.array([2.0, -np.inf, 50.0])[: case["heads"]] if case["sinks"] else None
    run = jax.jit(op_of(shape, backend="xla"))
    for seed, rows in enumerate(ROWS):
        made = make_case(seed, shape, rows)
        result = run(*arguments(made, sinks))
        assert_right(result[:2], made.expected(sinks), shape.q_dtype)


def test_tiles_fit_their_bytes() -> None:
    """As many tokens as fit, and never none."""
    q = jax.ShapeDtypeStruct((8192, 64, 512), "bfloat16")
    tokens, entries = xla_attention.tiles_for(q)
    assert tokens * entries * (2 * 512 + 64 * 6) <= 64 << 20 < (tokens + 1) * entries * (2 * 512 + 64 * 6)
    assert xla_attention.tiles_for(jax.ShapeDtypeStruct((3, 64, 512), "bfloat16")).tokens == 3
    assert xla_attention.tiles_for(jax.ShapeDtypeStruct((3, 1 << 20, 512), "bfloat16")).tokens == 1

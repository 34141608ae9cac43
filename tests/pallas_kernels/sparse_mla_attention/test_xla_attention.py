"""The vectorised XLA path of sparse_mla_attention against the float64 oracle, NaN wherever unnamed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.latent_entries import LatentFp8
from pallas_kernels.sparse_mla_attention import xla_attention
from pallas_kernels.token_places import EntryTiles
from tests.pallas_kernels.cases import assert_right
from tests.pallas_kernels.sparse_mla_attention.sparse_cases import Shape, make_case
from tests.pallas_kernels.sparse_mla_attention.test_kernel_tpu import arguments, op_of

ROWS = (None, [(1, 1), (0, 0), (1, 150), (17, 130), (5, 5)])
FP8 = LatentFp8(rope_dim=8, group=8)
CASES: tuple[dict[str, Any], ...] = (
    {"window": 140, "q_dtype": "bfloat16"},
    {"ratio": 4, "topk": 5, "entries": FP8, "latent": LatentShape(FP8.width(24), 6, "int8", "tpu")},
    {"ratio": 1},
    {"window": 0, "ratio": 1, "topk": 13, "q_dtype": "bfloat16"},
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_entries_that_exceed_a_tile(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of layer in tiles of 7 tokens and 11 entries."""
    monkeypatch.setattr(xla_attention, "tiles_for", lambda q: EntryTiles(7, 11))
    shape, sinks = Shape(num_q_heads=3, **case), np.array([2.0, -np.inf, 50.0])
    run = jax.jit(op_of(shape, backend="xla"))
    for seed, rows in enumerate(ROWS):
        made = make_case(seed, shape, rows)
        assert_right(run(*arguments(made, sinks))[:2], made.expected(sinks), shape.q_dtype)


def test_tiles_fit_their_bytes() -> None:
    """As many tokens as fit, and never none."""
    q = jax.ShapeDtypeStruct((8192, 64, 512), "bfloat16")
    tokens, entries = xla_attention.tiles_for(q)
    assert tokens * entries * (2 * 512 + 64 * 6) <= 64 << 20 < (tokens + 1) * entries * (2 * 512 + 64 * 6)
    assert xla_attention.tiles_for(jax.ShapeDtypeStruct((3, 64, 512), "bfloat16")).tokens == 3
    assert xla_attention.tiles_for(jax.ShapeDtypeStruct((3, 1 << 20, 512), "bfloat16")).tokens == 1

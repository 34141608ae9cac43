"""The indexer in vectorised XLA against a full sort of float64 scores, ties included; NaN in slots that nobody sees."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.indexer_topk.xla_topk import Limits
from pallas_kernels.indexer_topk.xla_topk import indexer_topk as by_limits
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, Plain
from tests.pallas_kernels.indexer_topk.test_indexer_topk import DIM, check
from tests.pallas_kernels.latent_cases import LatentShape

STEPS: tuple[Any, ...] = ((0, None), (2, [(1, 1), (0, 0), (1, 160), (17, 130), (5, 5)]))


@pytest.mark.parametrize(
    ("latent", "entries", "ratio", "topk", "q_dtype"),
    [
        (LatentShape(DIM, 4), Plain(), 1, 7, "float32"),
        pytest.param(LatentShape(DIM, 6, "bfloat16", "tpu"), Plain(), 4, 50, "bfloat16", marks=pytest.mark.sweep),
        (LatentShape(DIM + 4, 3, "int8"), IndexFp8(), 1, 140, "bfloat16"),
        pytest.param(LatentShape(DIM + 4, 64, "int8"), IndexFp8(), 128, 1, "float32", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_random_steps(
    latent: LatentShape, entries: EntryFormat, ratio: int, topk: int, q_dtype: str, backend: str
) -> None:
    """More entries than are asked for and fewer; lengths 0 and 1; equal scores go to the smaller entry."""
    op = functools.partial(indexer_topk, backend=backend)
    for seed, rows in STEPS:
        check(seed, latent, entries, ratio, topk, rows, op=op, q_dtype=q_dtype)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(5_000, 2_000),
        pytest.param(Limits(1, 1), marks=pytest.mark.sweep),
        pytest.param(Limits(1 << 20, 2_000), marks=pytest.mark.sweep),
    ],
)
def test_whatever_is_done_at_a_time(limits: Limits) -> None:
    op = functools.partial(by_limits, limits=limits)
    for seed, rows in STEPS:
        check(seed, LatentShape(DIM, 4), Plain(), 1, 20, rows, op=op)

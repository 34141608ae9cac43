"""The indexer's choice at the shape of a model, and steps that tests of its backends share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pallas_kernels.cases.case import Results
from pallas_kernels.indexer_topk.cases import IndexerCase
from pallas_kernels.interpret import compile_for
from pallas_kernels.sparse_mla_attention.shapes import SHAPES

MIXED = [(1, 1), (0, 0), (1, 160), (17, 130), (5, 5)]
SMALL = IndexerCase(
    tokens=24, seqs=5, context=160, heads=3, dim=8, topk=7, ratio=1, entry_page=8, dtype="float32", q_dtype="float32"
)


def check(case: IndexerCase, backend: str, rows: list[tuple[int, int]], call: Callable[..., Any] | None = None) -> None:
    """One step of `rows`, by `call` in place of the op."""
    arguments = case.step(np.random.default_rng(0), rows)
    run = compile_for(backend, call or partial(case.call, backend), *arguments)
    case.assert_right(Results(*run(*arguments)), arguments)


def test_model_shape() -> None:
    """All heads of DeepSeek V4's indexer over fp8 keys; every shard of tensor parallelism computes all of them."""
    sizes = IndexerCase.of_shape(SHAPES[0], 1)
    check(IndexerCase(platform="cpu", tokens=24, seqs=5, context=160, **sizes), "reference", [(1, 150), (9, 90)])

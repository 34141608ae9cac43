"""The indexer's choice against a full sort of float64 scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, Plain
from pallas_kernels.layouts import cdiv
from pallas_kernels.sparse_mla_attention.shapes import SHAPES
from tests.pallas_kernels import cases
from tests.pallas_kernels.latent_cases import LatentShape, laid_out, random_tables
from tests.pallas_kernels.sparse_oracle import picked

NUM_TOKENS, NUM_ROWS, MAX_LEN = 24, 5, 160
DIM, HEADS = 8, 3


def check(
    seed: int,
    latent: LatentShape,
    entries: EntryFormat,
    ratio: int,
    topk: int,
    rows: Sequence[tuple[int, int]] | None,
    dims: tuple[int, int] = (HEADS, DIM),
    op: Callable[..., Any] = indexer_topk,
    q_dtype: str = "float32",
) -> None:
    """One random step: keys are small integers, so that scores are exact and often equal; unseen slots hold NaN."""
    rng = np.random.default_rng(seed)
    heads, dim = dims
    if rows is None:
        rows = cases.random_rows(rng, cases.Shape(NUM_TOKENS, NUM_ROWS, MAX_LEN, 1))
    padded = [*rows, *[(0, 0)] * (NUM_ROWS - len(rows))]
    size, num_columns = latent.page_size, cdiv(cdiv(MAX_LEN, ratio), latent.page_size)
    named = [set(range(n // ratio)) if q_len else set() for q_len, n in padded]
    num_pages = 1 + NUM_ROWS * num_columns
    tables = random_tables(rng, [{e // size for e in row} for row in named], num_columns, num_pages)
    seen = np.zeros((num_pages, size), bool)
    for table, row in zip(tables, named, strict=True):
        for e in row:
            seen[table[e // size], e % size] = True
    keys = rng.integers(-2, 3, (num_pages, size, dim)).astype(np.float32)
    page = laid_out(in_format(keys, entries, latent.dtype), latent, seen)
    q = rng.integers(-2, 3, (NUM_TOKENS, heads, dim)).astype(np.float32)
    weights = rng.integers(-1, 4, (NUM_TOKENS, heads)).astype(np.float32)
    q_lens, lens = np.array(padded, np.int32).T
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    num_decode = sum(q_len <= 1 for q_len, _ in rows)
    got = np.asarray(
        op(
            jnp.asarray(q, q_dtype),
            jnp.asarray(weights),
            (jnp.asarray(page),),
            *(jnp.asarray(x) for x in (tables, lens, starts)),
            jnp.int32([num_decode, num_decode, len(rows)]),
            topk=topk,
            tokens_per_state=ratio,
            entries=entries,
            page_size=size,
        )
    )
    assert got.shape == (NUM_TOKENS, topk)
    expected = np.full((NUM_TOKENS, topk), -1)
    for row, (q_len, n) in enumerate(rows):
        for t, pos in zip(range(starts[row], starts[row + 1]), range(n - q_len, n), strict=True):
            visible = np.arange((pos + 1) // ratio)
            entry_keys = keys[tables[row, visible // size], visible % size]
            best = picked(q[t], weights[t], entry_keys, topk)
            expected[t, : len(best)] = best
    np.testing.assert_array_equal(got, expected)


def in_format(keys: np.ndarray, entries: EntryFormat, dtype: str) -> np.ndarray:
    """The keys as pages hold them, exactly: in fp8 with scale 1."""
    if entries == Plain():
        return keys.astype(jnp.dtype(dtype))
    scale = np.ones((*keys.shape[:-1], 1), np.float32).view(np.int8)
    return np.concatenate([keys.astype(ml_dtypes.float8_e4m3fn).view(np.int8), scale], axis=-1)


@pytest.mark.parametrize(
    ("latent", "entries", "ratio", "topk"),
    [
        (LatentShape(DIM, 4), Plain(), 1, 7),
        (LatentShape(DIM, 6, "bfloat16", "tpu"), Plain(), 4, 50),
        pytest.param(LatentShape(DIM + 4, 3, "int8", "tpu"), IndexFp8(), 1, 140, marks=pytest.mark.sweep),
        pytest.param(LatentShape(DIM + 4, 64, "int8"), IndexFp8(), 128, 1, marks=pytest.mark.sweep),
    ],
)
def test_random_steps(latent: LatentShape, entries: EntryFormat, ratio: int, topk: int) -> None:
    """More entries than a tile and fewer than asked for; lengths 0 and 1; equal scores go to the smaller entry."""
    for seed, rows in ((0, None), (1, None), (2, [(1, 1), (0, 0), (1, 160), (17, 130), (5, 5)])):
        check(seed, latent, entries, ratio, topk, rows)


def test_model_shape() -> None:
    """All heads of DeepSeek V4's indexer over fp8 keys; every shard of tensor parallelism computes all of them."""
    (model,) = (shape for shape in SHAPES if shape.name == "deepseek-v4-flash")
    latent = LatentShape(model.index_dim + 4, 64, "int8")
    dims = (model.num_index_heads, model.index_dim)
    check(0, latent, IndexFp8(), 4, model.topk, [(1, 150), (9, 90)], dims)

"""indexer_topk: picks for decode, prefill and both mixed, at the model shapes.

All numbers are whole and small, so that scores are exact in any order of summation and every implementation must pick
the same entries in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.latent_entries import IndexFp8
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention.shapes import SHAPES, SparseShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.entries import KINDS, Entries, entry_bytes, entry_pages, entry_rows, stored_in
from scripts.kernel_bench.step import Step, words

OP = "indexer_topk"
_SMALL_TOPK = 16
_LARGEST = 14.0  # 448, the largest of e4m3, times a power of two: scales of keys are exact, too


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape, each kind of step; shards have all index heads."""
    for shape in SHAPES:
        for kind in KINDS:
            yield case(kind, shape, sizes)


def case(kind: str, shape: SparseShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    entries = Entries(entry_rows(kind, sizes), shape.ratios[0])
    return BenchCase(
        OP,
        kind,
        shape.name,
        words(entries.rows),
        sizes,
        work(entries, shape, sizes),
        lambda seed: arguments(entries, shape, sizes, seed),
        lambda backend, pages, rest: call(entries, shape, sizes, backend, pages, rest),
        lambda: case(kind, replace(shape, topk=_SMALL_TOPK), replace(sizes, small=True)),
        has_tokens_in_pages=False,  # pages of entries are the model's
    )


def work(entries: Entries, shape: SparseShape, sizes: Sizes) -> Work:
    """Each key that any query sees once; queries and weights read, picks written. A product of vectors, and its share
    added, for each head of a pair."""
    heads, dim = shape.num_index_heads, shape.index_dim
    num_tokens = sum(q for q, _ in entries.rows)
    num_bytes = entries.num_seen * entry_bytes(dim, sizes.dtype, IndexFp8())
    num_bytes += num_tokens * (heads * (dim * itemsize(sizes.q_dtype) + 4) + 4 * shape.topk)
    return Work(num_bytes, entries.num_pairs(None) * heads * (2 * dim + 2))


def arguments(entries: Entries, shape: SparseShape, sizes: Sizes, seed: int) -> Arguments:
    """pages: the keys; rest: q, weights, step."""
    rng = np.random.default_rng(seed)
    pages = entry_pages(rng, shape.index_dim, entries.page, entries.step.num_pages, sizes, IndexFp8(), _keys)
    tables = entries.step.arrays(rng)[0]
    step = Step(entries.rows, MaskRule(), entries.page * entries.ratio).arrays(rng)[1:]
    size = (sum(q for q, _ in entries.rows), shape.num_index_heads)
    q = jnp.rint(4 * random_array(rng, (*size, shape.index_dim), "float32")).astype(sizes.q_dtype)
    weights = jnp.rint(4 * random_array(rng, size, "float32"))
    return Arguments((pages,), (q, weights, (tables, *step)))


def _keys(normal: np.ndarray) -> np.ndarray:
    """The first number of each is the largest, which the format scales by."""
    whole = np.clip(np.rint(4 * normal), -_LARGEST, _LARGEST)
    whole[..., 0] = _LARGEST
    return whole


def call(
    entries: Entries, shape: SparseShape, sizes: Sizes, backend: str, pages: Any, rest: Any
) -> tuple[Any, tuple[()]]:
    """The picks."""
    q, weights, step = rest
    options = {"topk": shape.topk, "tokens_per_state": entries.ratio, "page_size": entries.page}
    stored = stored_in(sizes.dtype, IndexFp8())[0]
    return indexer_topk(q, weights, pages, *step, entries=stored, backend=backend, **options), ()

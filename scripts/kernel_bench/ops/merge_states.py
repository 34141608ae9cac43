"""merge_states: two and eight parts of a decode step, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels.merge_states import merge_states
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from scripts.kernel_bench.case import Arguments, BenchCase, Sizes, Work, itemsize, random_array
from scripts.kernel_bench.shards import splits, with_most_shards

OP = "merge_states"
_LSE_BYTES = 4


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape."""
    for shape in SHAPES:
        if splits(shape, sizes.shards):
            for num_parts in (2, 8):
                yield case(num_parts, shape, sizes)


def case(num_parts: int, shape: AttentionShape, sizes: Sizes) -> BenchCase:
    """So many parts of one shape."""
    size = (num_parts, 5 if sizes.small else sizes.batch or 512, shape.per_shard(sizes.shards)[0], shape.head_dim)
    return BenchCase(
        OP,
        f"{num_parts} parts",
        shape.name,
        f"{size[1]} tokens",
        sizes,
        work(size, sizes),
        lambda seed: arguments(size, sizes, seed),
        call,
        lambda: case(num_parts, shape, with_most_shards(shape, replace(sizes, small=True))),
        has_tokens_in_pages=False,
        same=size,
    )


def work(size: tuple[int, int, int, int], sizes: Sizes) -> Work:
    """Outputs and LSEs of the parts read, those of the whole written; a multiplication and an addition a number."""
    num_parts, num_tokens, num_heads, dim = size
    entry = dim * itemsize(sizes.q_dtype) + _LSE_BYTES
    return Work((num_parts + 1) * num_tokens * num_heads * entry, 2 * num_parts * num_tokens * num_heads * dim)


def arguments(size: tuple[int, int, int, int], sizes: Sizes, seed: int) -> Arguments:
    """rest: outputs, LSEs; there are no pages."""
    rng = np.random.default_rng(seed)
    return Arguments((), (random_array(rng, size, sizes.q_dtype), random_array(rng, size[:3], "float32")))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """With the LSE of the whole."""
    result = merge_states(*rest, return_lse=True, backend=backend)
    return (result.out, result.lse), ()

"""copy_pages, zero_pages, gather_pages and scatter_pages: 64 pages of a pool, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import PageLayout, attention_layout
from pallas_kernels.page_ops import copy_pages, gather_pages, scatter_pages, zero_pages
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from scripts.kernel_bench.case import Arguments, BenchCase, Sizes, Work, itemsize, random_array, random_pages
from scripts.kernel_bench.shards import splits, with_most_shards

OP = "page_ops"
KINDS = ("copy", "zero", "gather", "scatter")
_POOL_BYTES = 1 << 28


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape."""
    for shape in SHAPES:
        if splits(shape, sizes.shards):
            for kind in KINDS:
                yield case(kind, shape, sizes)


def case(kind: str, shape: AttentionShape, sizes: Sizes) -> BenchCase:
    """One op on the pages of one shape."""
    count = 3 if sizes.small else sizes.batch or 64
    num_kv_heads = shape.per_shard(sizes.shards)[1]
    layout = attention_layout(
        num_kv_heads=num_kv_heads,
        head_dim=shape.head_dim,
        page_size=sizes.page,
        dtype=sizes.dtype,
        platform=sizes.platform,
    )
    return BenchCase(
        OP,
        kind,
        shape.name,
        f"{count} pages",
        sizes,
        work(kind, count, 2 * sizes.page * num_kv_heads * shape.head_dim * itemsize(sizes.dtype)),
        lambda seed: arguments(kind, count, layout, sizes, seed),
        lambda backend, pages, rest: call(kind, backend, pages, rest),
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        writes=kind != "gather",
        same=(num_kv_heads, shape.head_dim),
    )


def work(kind: str, count: int, page_bytes: int) -> Work:
    """Each page read, but for `zero`, and written."""
    return Work((1 if kind == "zero" else 2) * count * page_bytes, 0)


def arguments(kind: str, count: int, layout: PageLayout, sizes: Sizes, seed: int) -> Arguments:
    """rest: ids read, ids written, the values that `scatter` writes."""
    rng = np.random.default_rng(seed)
    num_pages = 1 + (2 * count if sizes.small else max(2 * count, _POOL_BYTES // layout.page_bytes))
    pages = random_pages(rng, layout, num_pages)
    sources, targets = (1 + rng.permutation(num_pages - 1)[: 2 * count]).reshape(2, count)
    values = tuple(random_array(rng, array.shape(count), array.dtype) for array in layout.arrays if kind == "scatter")
    return Arguments(pages, (jnp.asarray(sources, jnp.int32), jnp.asarray(targets, jnp.int32), values))


def call(kind: str, backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Over the arrays of the layout, one after the other."""
    sources, targets, values = rest
    if kind == "gather":
        return tuple(gather_pages(array, sources, backend=backend) for array in pages), ()
    if kind == "scatter":
        return (), tuple(
            scatter_pages(a, targets, new, backend=backend) for a, new in zip(pages, values, strict=True)
        )  # fmt: skip
    if kind == "copy":
        return (), tuple(copy_pages(array, sources, targets, backend=backend) for array in pages)
    return (), tuple(zero_pages(array, targets, backend=backend) for array in pages)

"""kv_write: the new K and V of a decode step and of a prefill step, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import attention_layout
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from scripts.kernel_bench.case import Arguments, BenchCase, Sizes, Work, itemsize, random_array, random_pages
from scripts.kernel_bench.shards import splits, with_most_shards
from scripts.kernel_bench.slots import Slots, slots_of

OP = "kv_write"


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape."""
    for shape in SHAPES:
        if splits(shape, sizes.shards):
            for kind in ("decode", "prefill"):
                yield case(kind, shape, sizes)


def case(kind: str, shape: AttentionShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    slots = slots_of(kind, sizes)
    num_kv_heads = shape.per_shard(sizes.shards)[1]
    return BenchCase(
        OP,
        kind,
        shape.name,
        f"{slots.num_tokens} tokens",
        sizes,
        work(slots.num_tokens, num_kv_heads, shape.head_dim, sizes),
        lambda seed: arguments(slots, num_kv_heads, shape.head_dim, sizes, seed),
        call,
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        writes=True,
        same=(num_kv_heads, shape.head_dim),
    )


def work(num_tokens: int, num_kv_heads: int, head_dim: int, sizes: Sizes) -> Work:
    """New K and V read, and written into pages."""
    return Work(2 * num_tokens * num_kv_heads * head_dim * (itemsize(sizes.q_dtype) + itemsize(sizes.dtype)), 0)


def arguments(slots: Slots, num_kv_heads: int, head_dim: int, sizes: Sizes, seed: int) -> Arguments:
    """rest: new K, new V, slots."""
    rng = np.random.default_rng(seed)
    layout = attention_layout(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=sizes.page,
        dtype=sizes.dtype,
        platform=sizes.platform,
    )
    pages = random_pages(rng, layout, slots.num_pages)
    k, v = (random_array(rng, (slots.num_tokens, num_kv_heads, head_dim), sizes.q_dtype) for _ in range(2))
    return Arguments(pages, (k, v, slots.array(rng)))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """The pages are the result."""
    k, v, slots = rest
    return (), kv_write(k, v, pages, slots, backend=backend)

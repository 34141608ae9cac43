"""mla_paged_attention: decode, prefill and both mixed over latents, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.cases.pages import random_pages
from pallas_kernels.cases.steps import Step, rows_of, words
from pallas_kernels.layouts import latent_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.mla_paged_attention.shapes import SHAPES, LatentShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.shards import splits, with_most_shards

OP = "mla_paged_attention"


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so, each kind of step."""
    for shape in SHAPES:
        for kind in ("decode", "decode-long", "prefill", "mixed") if splits(shape, sizes.shards) else ():
            yield case(kind, shape, sizes)


def case(kind: str, shape: LatentShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    step = Step(rows_of(kind, sizes.batch, sizes.context, sizes.small), MaskRule(), sizes.page)
    num_heads = shape.per_shard(sizes.shards)
    return BenchCase(
        OP,
        kind,
        shape.name,
        words(step.rows),
        sizes,
        work(step, num_heads, shape, sizes),
        lambda seed: arguments(step, num_heads, shape, sizes, seed),
        lambda backend, pages, rest: call(shape, sizes, backend, pages, rest),
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        setting=shape,
    )


def work(step: Step, num_heads: int, shape: LatentShape, sizes: Sizes) -> Work:
    """Each latent seen once, as key and value; queries and outputs."""
    key, value = shape.latent_dim + shape.rope_dim, shape.latent_dim
    num_bytes = step.tokens_seen * key * itemsize(sizes.dtype)
    num_bytes += step.num_tokens * num_heads * (key + value) * itemsize(sizes.q_dtype)
    return Work(num_bytes, 2 * step.pairs_seen * num_heads * (key + value))


def arguments(step: Step, num_heads: int, shape: LatentShape, sizes: Sizes, seed: int) -> Arguments:
    """Random pages in random order; rest: both parts of q, step."""
    rng = np.random.default_rng(seed)
    layout = latent_layout(
        head_dim=shape.latent_dim + shape.rope_dim, page_size=sizes.page, dtype=sizes.dtype, platform=sizes.platform
    )
    pages = random_pages(rng, layout, step.num_pages)
    dims = (shape.latent_dim, shape.rope_dim)
    q = tuple(random_array(rng, (step.num_tokens, num_heads, dim), sizes.q_dtype) for dim in dims)
    return Arguments(pages, (q, step.arrays(rng)))


def call(shape: LatentShape, sizes: Sizes, backend: str, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """The op alone, no write of new latents."""
    q, step = rest
    options = {"sm_scale": shape.sm_scale, "page_size": sizes.page, "backend": backend}
    return mla_paged_attention(*q, pages, *step, **options).out, ()

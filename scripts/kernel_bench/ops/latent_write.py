"""latent_write: the new latents of a decode step and of a prefill step, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels.latent_write import latent_write
from pallas_kernels.layouts import latent_layout
from pallas_kernels.mla_paged_attention.shapes import SHAPES, LatentShape
from scripts.kernel_bench.case import Arguments, BenchCase, Sizes, Work, itemsize, random_array, random_pages
from scripts.kernel_bench.slots import Slots, slots_of

OP = "latent_write"


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape; shards hold all latents."""
    for shape in SHAPES:
        for kind in ("decode", "prefill"):
            yield case(kind, shape, sizes)


def case(kind: str, shape: LatentShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    slots, dim = slots_of(kind, sizes), shape.latent_dim + shape.rope_dim
    return BenchCase(
        OP,
        kind,
        shape.name,
        f"{slots.num_tokens} tokens",
        sizes,
        work(slots.num_tokens, dim, sizes),
        lambda seed: arguments(slots, dim, sizes, seed),
        lambda backend, pages, rest: call(sizes, backend, pages, rest),
        lambda: case(kind, shape, replace(sizes, small=True)),
        writes=True,
        same=dim,
    )


def work(num_tokens: int, dim: int, sizes: Sizes) -> Work:
    """New states read, and written into pages."""
    return Work(num_tokens * dim * (itemsize(sizes.q_dtype) + itemsize(sizes.dtype)), 0)


def arguments(slots: Slots, dim: int, sizes: Sizes, seed: int) -> Arguments:
    """rest: states, slots."""
    rng = np.random.default_rng(seed)
    layout = latent_layout(head_dim=dim, page_size=sizes.page, dtype=sizes.dtype, platform=sizes.platform)
    pages = random_pages(rng, layout, slots.num_pages)
    return Arguments(pages, (random_array(rng, (slots.num_tokens, dim), sizes.q_dtype), slots.array(rng)))


def call(sizes: Sizes, backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """The pages are the result."""
    states, slots = rest
    return (), latent_write(states, pages, slots, page_size=sizes.page, backend=backend)

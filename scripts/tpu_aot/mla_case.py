"""What of latent attention can be compiled: latent_write, mla_paged_attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.latent_write import kernel_tpu as write_kernel
from pallas_kernels.layouts import PageLayout, latent_layout
from pallas_kernels.mla_paged_attention.shapes import SHAPES

# Slots of the pages by default: so many that XLA cannot keep the pages in VMEM, which it does with a small array.
POOL_STATES = 1 << 19


@dataclass(frozen=True)
class LatentCase:
    """Sizes of the latent pages that an op works on."""

    latent_dim: int = 512
    rope_dim: int = 64
    page: int = 128
    dtype: str = "bfloat16"  # of the pages
    tokens: int = 512

    def layout(self, page_size: int) -> PageLayout:
        """Of pages of `page_size` states."""
        return latent_layout(
            head_dim=self.latent_dim + self.rope_dim, page_size=page_size, dtype=self.dtype, platform="tpu"
        )

    @property
    def pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The page arrays."""
        return tuple(_array(a.shape(POOL_STATES // self.page), a.dtype) for a in self.layout(self.page).arrays)


def write(case: LatentCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """latent_write, with the pages donated by its caller."""
    states = _array((case.tokens, case.latent_dim + case.rope_dim), "bfloat16")
    call = functools.partial(write_kernel.latent_write, page_size=case.page)
    return call, (states, case.pages, _array((case.tokens,), "int32"), None)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


OPERATIONS = {"latent_write": (LatentCase, write)}

# The latents are whole on every shard.
SHAPE_CASES = {
    "latent_write": lambda _: [
        (shape.name, [f"latent_dim={shape.latent_dim}", f"rope_dim={shape.rope_dim}"]) for shape in SHAPES
    ]
}

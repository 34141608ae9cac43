"""page_ops in plain jnp: the specification, and the CPU path. In place where the caller donates the pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.jit
def copy_pages(pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.copy_pages`."""
    return scatter_pages(pages, destinations, gather_pages(pages, sources))


@jax.jit
def zero_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.zero_pages`."""
    return pages.at[_writable(pages, page_ids)].set(jnp.zeros((), pages.dtype), mode="drop")


@jax.jit
def gather_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.gather_pages`."""
    return pages[jnp.maximum(page_ids, 0)]


@jax.jit
def scatter_pages(pages: jax.Array, page_ids: jax.Array, values: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.scatter_pages`."""
    return pages.at[_writable(pages, page_ids)].set(values, mode="drop")


def _writable(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Ids with -1 and the null page moved out of range, where a scatter drops them."""
    return jnp.where(page_ids < 1, pages.shape[0], page_ids)

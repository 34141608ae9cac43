"""Jitted work on pages outside the model: write, copy, zero, gather, scatter. All but gather donate and work in place.

Flow:    KVPages + page ids of the host -> [page_ops] -> KVPages
Source:  DESIGN, "Device layer"; ids -1 and 0 are skipped, so page 0 stays zero and padding costs nothing

Id lists are padded to declared lengths (`Buckets.page_counts`), so that they compile nothing new. A function that
returns KVPages deletes the KVPages it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.device.pages import Column, KVPages
from pallas_kernels import kv_write as kv_write_op

PAGE_COUNTS = (8, 64)
SKIP = -1


@partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def write_kv(
    pages: KVPages,
    pool_id: int,
    column: int,
    k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: jax.Array,  # int32[num_tokens] -1: skip
) -> KVPages:
    """Pages with K and V of each token at its slot of one column."""
    arrays = kv_write_op.kv_write(k, v, pages.column(pool_id, column), slot_mapping)
    return pages.with_column(pool_id, column, arrays)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def copy_pages_padded(
    pages: KVPages,
    pool_id: int,
    sources: jax.Array,  # int32[count]
    destinations: jax.Array,  # int32[count] -1: skip
) -> KVPages:
    """`copy_pages` on ids already padded: every source is read before any destination is written."""
    target = _drop_unwritable(destinations, pages.num_pages(pool_id))
    source = jnp.maximum(sources, 0)
    return _map_pool(pages, pool_id, lambda array: array.at[target].set(array[source], mode="drop"))


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def zero_pages_padded(pages: KVPages, pool_id: int, page_ids: jax.Array) -> KVPages:  # page_ids int32[count]
    """`zero_pages` on ids already padded with -1."""
    target = _drop_unwritable(page_ids, pages.num_pages(pool_id))
    return _map_pool(pages, pool_id, lambda array: array.at[target].set(jnp.zeros((), array.dtype), mode="drop"))


@partial(jax.jit, static_argnums=1)
def gather_pages_padded(pages: KVPages, pool_id: int, page_ids: jax.Array) -> tuple[Column, ...]:
    """`gather_pages` on ids already padded; -1 gives zeros, the null page."""
    source = jnp.maximum(page_ids, 0)
    return jax.tree.map(lambda array: array[source], pages.pools[pool_id])


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def scatter_pages_padded(
    pages: KVPages,
    pool_id: int,
    page_ids: jax.Array,  # int32[count]
    values: tuple[Column, ...],  # as gather_pages returns: [count, *page_shape] per array
) -> KVPages:
    """`scatter_pages` on ids already padded with -1."""
    target = _drop_unwritable(page_ids, pages.num_pages(pool_id))
    columns = jax.tree.map(lambda array, x: array.at[target].set(x, mode="drop"), pages.pools[pool_id], values)
    return pages.with_pool(pool_id, columns)


def copy_pages(
    pages: KVPages,
    pool_id: int,
    sources: np.ndarray,  # int32[C]
    destinations: np.ndarray,  # int32[C] distinct, none of them a source
    page_counts: Sequence[int] = PAGE_COUNTS,
) -> KVPages:
    """Copies whole pages inside a pool, over all its columns.

    Raises:
        ValueError: lengths differ, an id is outside the pool, a destination is repeated, null or also a source. The
            pages are untouched.
    """
    check_copies(pages.num_pages(pool_id), sources, destinations)
    for piece in _pieces(sources.size, page_counts):
        ids = (pad_ids(array[piece], page_counts) for array in (sources, destinations))
        pages = copy_pages_padded(pages, pool_id, *ids)
    return pages


def zero_pages(
    pages: KVPages,
    pool_id: int,
    page_ids: np.ndarray,  # int32[Z]
    page_counts: Sequence[int] = PAGE_COUNTS,
) -> KVPages:
    """Sets whole pages of a pool to zero, over all its columns.

    Raises:
        ValueError: an id is outside the pool or null. The pages are untouched.
    """
    check_page_ids(page_ids, pages.num_pages(pool_id))
    for piece in _pieces(page_ids.size, page_counts):
        pages = zero_pages_padded(pages, pool_id, pad_ids(page_ids[piece], page_counts))
    return pages


def gather_pages(
    pages: KVPages,
    pool_id: int,
    page_ids: np.ndarray,  # int32[n]
    page_counts: Sequence[int] = PAGE_COUNTS,
) -> tuple[Column, ...]:
    """Copies of pages, per column a tuple of [count, *page_shape]; rows from n to the padded count are zero.

    Raises:
        ValueError: an id is outside the pool, or there are more than the largest padded length.
    """
    check_page_ids(page_ids, pages.num_pages(pool_id), lowest=0)
    return gather_pages_padded(pages, pool_id, pad_ids(page_ids, page_counts))


def scatter_pages(
    pages: KVPages,
    pool_id: int,
    page_ids: np.ndarray,  # int32[n]
    values: tuple[Column, ...],  # as gather_pages returned them for n ids
    page_counts: Sequence[int] = PAGE_COUNTS,
) -> KVPages:
    """Writes pages that `gather_pages` read, perhaps from other ids or another KVPages.

    Raises:
        ValueError: an id is outside the pool or null, there are too many, or `values` have another padded length. The
            pages are untouched.
    """
    check_page_ids(page_ids, pages.num_pages(pool_id))
    ids = pad_ids(page_ids, page_counts)
    lengths = {array.shape[0] for array in jax.tree.leaves(values)}
    if lengths != {ids.size}:
        raise ValueError(f"expected values padded to {ids.size} pages, got {sorted(lengths)}")
    return scatter_pages_padded(pages, pool_id, ids, values)


def pad_ids(page_ids: np.ndarray, page_counts: Sequence[int] = PAGE_COUNTS) -> np.ndarray:
    """A fresh int32 copy of `page_ids`, filled with -1 up to the smallest declared length that holds it.

    Raises:
        ValueError: there are more ids than the largest length.
    """
    length = min((count for count in page_counts if count >= page_ids.size), default=0)
    if not length:
        raise ValueError(f"expected at most {max(page_counts)} page ids a call, got {page_ids.size}")
    out = np.full(length, SKIP, np.int32)
    out[: page_ids.size] = page_ids
    return out


def check_copies(num_pages: int, sources: np.ndarray, destinations: np.ndarray) -> None:
    """Raises ValueError unless the copies may be done in any order inside a pool of `num_pages`."""
    check_page_ids(sources, num_pages, "sources", lowest=0)
    check_page_ids(destinations, num_pages, "destinations")
    if sources.shape != destinations.shape:
        raise ValueError(f"expected as many sources as destinations, got {sources.size} and {destinations.size}")
    if np.unique(destinations).size != destinations.size:
        raise ValueError(f"expected distinct destinations, got {destinations.tolist()}")
    if np.isin(destinations, sources).any():
        raise ValueError(f"destinations {np.intersect1d(destinations, sources).tolist()} are sources too")


def check_page_ids(page_ids: np.ndarray, num_pages: int, what: str = "page ids", *, lowest: int = 1) -> None:
    """Raises ValueError unless all ids are in `[lowest, num_pages)`; page 0 may be read, never written."""
    if page_ids.size and (page_ids.min() < lowest or page_ids.max() >= num_pages):
        raise ValueError(f"expected {what} in [{lowest}, {num_pages}), got {page_ids.min()} to {page_ids.max()}")


def _drop_unwritable(page_ids: jax.Array, num_pages: int) -> jax.Array:
    """Ids with -1 and the null page moved out of range, where a scatter drops them."""
    return jnp.where(page_ids < 1, num_pages, page_ids)


def _map_pool(pages: KVPages, pool_id: int, function) -> KVPages:  # type: ignore[no-untyped-def]
    return pages.with_pool(pool_id, jax.tree.map(function, pages.pools[pool_id]))


def _pieces(count: int, page_counts: Sequence[int]) -> Iterator[slice]:
    step = max(page_counts)
    return (slice(start, start + step) for start in range(0, count, step))

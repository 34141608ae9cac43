"""Jitted work on pages outside the model: write, copy, zero, gather, scatter. All but gather donate and work in place.

Flow:    KVPages + page ids of the host -> [page_ops] -> KVPages
Source:  ARCHITECTURE.md, "Page arrays"; ids -1 and 0 are skipped, so page 0 stays zero and padding costs nothing

Kernels run once per device, on its part of the heads. Id lists are padded to declared lengths
(`Buckets.page_counts`), so that they compile nothing new; in those of padded functions the lists of all data ranks,
each of the rank's own ids, stand one after another. A function that returns KVPages deletes the KVPages it was given.
`backend` as the ops of pallas_kernels take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kvjax.core.tables.given_arrays import own_copy
from kvjax.device.mesh.context_ranks import ContextRanks
from kvjax.device.mesh.placement import per_device
from kvjax.device.mesh.transfers import hands_over
from kvjax.device.pages.kv_pages import Column, KVPages
from pallas_kernels import kv_write as kv_write_op
from pallas_kernels import page_ops
from pallas_kernels.slab_pages import replaced

Array: TypeAlias = np.ndarray | jax.Array
PAGE_COUNTS = (8, 64)
SKIP = -1


def write_kv(
    pages: KVPages,
    pool_id: int,
    column: int,
    k: Array,  # [num_tokens, num_kv_heads, head_dim]
    v: Array,  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: Array,  # int32[num_tokens] -1: skip
    *,
    backend: str = "auto",
) -> KVPages:
    """Pages with K and V of each token at its slot of one column."""
    return write_own_kv(pages, pool_id, column, *map(own_copy, (k, v, slot_mapping)), backend=backend)


@partial(jax.jit, static_argnums=(1, 2), static_argnames="backend", donate_argnums=0)
def write_own_kv(
    pages: KVPages,
    pool_id: int,
    column: int,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    backend: str = "auto",
) -> KVPages:
    """`write_kv` of arrays that nobody writes any more."""
    sharding, specs = pages.shardings[pool_id][column][0], pages.specs(pool_id, column)
    rows, token_axis, mesh = PartitionSpec(sharding.spec[0]), sharding.spec[1], sharding.mesh
    heads = PartitionSpec(*rows, sharding.spec[2])

    def write_own(k, v, arrays, slots):  # type: ignore[no-untyped-def]
        if token_axis is not None and mesh.size > 1:
            slots = ContextRanks(token_axis, mesh.shape[token_axis]).own_slots(slots)
        return kv_write_op.kv_write(k, v, arrays, slots, backend=backend)

    write = per_device(write_own, mesh, (heads, heads, specs, rows), specs)
    return pages.with_column(pool_id, column, write(k, v, pages.column(pool_id, column), slot_mapping))


@partial(jax.jit, static_argnums=1, static_argnames="backend", donate_argnums=0)
def copy_pages_padded(
    pages: KVPages,
    pool_id: int,
    sources: jax.Array,  # int32[count]
    destinations: jax.Array,  # int32[count] -1: skip
    *,
    backend: str = "auto",
) -> KVPages:
    """`copy_pages` on ids already padded."""
    copy = partial(page_ops.copy_pages, backend=backend)
    return _per_device(pages, pool_id, copy, sources, destinations)


@partial(jax.jit, static_argnums=1, static_argnames="backend", donate_argnums=0)
def zero_pages_padded(
    pages: KVPages,
    pool_id: int,
    page_ids: jax.Array,  # int32[count]
    *,
    backend: str = "auto",
) -> KVPages:
    """`zero_pages` on ids already padded with -1."""
    zero = partial(page_ops.zero_pages, backend=backend)
    return _per_device(pages, pool_id, zero, page_ids)


@partial(jax.jit, static_argnums=1, static_argnames="backend")
def gather_pages_padded(
    pages: KVPages,
    pool_id: int,
    page_ids: jax.Array,  # int32[count]
    *,
    backend: str = "auto",
) -> tuple[Column, ...]:
    """`gather_pages` on ids already padded; -1 gives zeros, the null page."""
    specs, rows, mesh = _specs(pages, pool_id)

    def gather(columns: tuple[Column, ...], page_ids: jax.Array) -> tuple[Column, ...]:
        return tuple(tuple(page_ops.gather_pages(array, page_ids, backend=backend) for array in c) for c in columns)

    outputs = jax.tree.map(lambda sharding: sharding.spec, pages.shardings[pool_id])
    gathered: tuple[Column, ...] = per_device(gather, mesh, (specs, rows), outputs)(pages.pools[pool_id], page_ids)
    return gathered


@partial(jax.jit, static_argnums=1, static_argnames="backend", donate_argnums=0)
def scatter_pages_padded(
    pages: KVPages,
    pool_id: int,
    page_ids: jax.Array,  # int32[count]
    values: tuple[Column, ...],  # as gather_pages returns: [count, *page_shape] per array
    *,
    backend: str = "auto",
) -> KVPages:
    """`scatter_pages` on ids already padded with -1."""
    scatter = partial(page_ops.scatter_pages, backend=backend)
    return _per_device(pages, pool_id, scatter, page_ids, values=values)


@hands_over
def copy_pages(
    pages: KVPages,
    pool_id: int,
    sources: np.ndarray,  # int32[C]
    destinations: np.ndarray,  # int32[C] distinct, none of them a source
    page_counts: Sequence[int] = PAGE_COUNTS,
    *,
    backend: str = "auto",
) -> KVPages:
    """Copies whole pages inside a pool, over all its columns.

    Raises:
        ValueError: lengths differ, an id is outside the pool, a destination is repeated, null or also a source. The
            pages are untouched.
    """
    check_copies(pages.num_pages(pool_id), sources, destinations)
    for piece in _pieces(sources.size, page_counts):
        ids = (pad_ids(array[piece], page_counts) for array in (sources, destinations))
        pages = copy_pages_padded(pages, pool_id, *ids, backend=backend)
    return pages


@hands_over
def zero_pages(
    pages: KVPages,
    pool_id: int,
    page_ids: np.ndarray,  # int32[Z]
    page_counts: Sequence[int] = PAGE_COUNTS,
    *,
    backend: str = "auto",
) -> KVPages:
    """Sets whole pages of a pool to zero, over all its columns.

    Raises:
        ValueError: an id is outside the pool or null. The pages are untouched.
    """
    check_page_ids(page_ids, pages.num_pages(pool_id))
    for piece in _pieces(page_ids.size, page_counts):
        pages = zero_pages_padded(pages, pool_id, pad_ids(page_ids[piece], page_counts), backend=backend)
    return pages


@hands_over
def gather_pages(
    pages: KVPages,
    pool_id: int,
    page_ids: np.ndarray,  # int32[n]
    page_counts: Sequence[int] = PAGE_COUNTS,
    *,
    backend: str = "auto",
) -> tuple[Column, ...]:
    """Copies of pages, per column a tuple of [count, *page_shape]; rows from n to the padded count are zero.

    Raises:
        ValueError: an id is outside the pool, or there are more than the largest padded length.
    """
    check_page_ids(page_ids, pages.num_pages(pool_id), lowest=0)
    return gather_pages_padded(pages, pool_id, pad_ids(page_ids, page_counts), backend=backend)


@hands_over
def scatter_pages(
    pages: KVPages,
    pool_id: int,
    page_ids: np.ndarray,  # int32[n]
    values: tuple[Column, ...],  # as gather_pages returned them for n ids
    page_counts: Sequence[int] = PAGE_COUNTS,
    *,
    backend: str = "auto",
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
    return scatter_pages_padded(pages, pool_id, ids, jax.tree.map(own_copy, values), backend=backend)


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


def padded_pieces(by_rank: Sequence[np.ndarray], page_counts: Sequence[int]) -> Iterator[np.ndarray]:
    """int32[ranks * count] each: the next ids of every rank, padded to one declared length."""
    most, step = max(ids.size for ids in by_rank), max(page_counts)
    for start in range(0, most, step):
        count = min(count for count in page_counts if count >= min(most - start, step))
        yield np.concatenate([pad_ids(ids[start : start + step], (count,)) for ids in by_rank])


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


def _per_device(
    pages: KVPages,
    pool_id: int,
    function: Callable[..., jax.Array],  # (array, *ids, its values if given) -> array, one of pallas_kernels.page_ops
    *ids: jax.Array,  # int32[count]
    values: tuple[Column, ...] | None = None,
) -> KVPages:
    """The pages after `function` of every array of a pool, each device on its part."""
    specs, rows, mesh = _specs(pages, pool_id)
    value_specs = None if values is None else jax.tree.map(lambda sharding: sharding.spec, pages.shardings[pool_id])

    def run(
        columns: tuple[Column, ...], values: tuple[Column, ...] | None, ids: tuple[jax.Array, ...]
    ) -> tuple[Column, ...]:
        written = []
        for place, column in enumerate(columns):
            for i in range(len(column)):
                of_array = () if values is None else (values[place][i],)
                column = replaced(column, i, function(column[i], *ids, *of_array))
            written.append(column)
        return tuple(written)

    run_on_each = per_device(run, mesh, (specs, value_specs, rows), specs)
    return pages.with_pool(pool_id, run_on_each(pages.pools[pool_id], values, ids))


def _specs(pages: KVPages, pool_id: int) -> tuple[tuple[Any, ...], PartitionSpec, Mesh | AbstractMesh]:
    """PartitionSpecs of a pool's columns and of what data ranks have one after another, and the mesh."""
    sharding = pages.shardings[pool_id][0][0]
    columns = range(len(pages.shardings[pool_id]))
    return tuple(pages.specs(pool_id, column) for column in columns), PartitionSpec(sharding.spec[0]), sharding.mesh


def _pieces(count: int, page_counts: Sequence[int]) -> Iterator[slice]:
    step = max(page_counts)
    return (slice(start, start + step) for start in range(0, count, step))

"""Checks of page_ops' arguments: static ones always, ids where they are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks


def check_pages(op: str, pages: jax.Array) -> None:
    """Raises ValueError unless `pages` is an array of pages."""
    if np.ndim(pages) < 2:
        raise ValueError(f"{op}: expected pages [num_pages, *page_shape], got shape {np.shape(pages)}")


def check_ids(op: str, name: str, pages: jax.Array, page_ids: jax.Array) -> None:
    """Raises ValueError unless the ids are int32[n] and (where known) in [-1, num_pages)."""
    checks.check_array(op, name, page_ids, (None,), "[n]")
    checks.check_int32(op, name, page_ids)
    known = checks.concrete(page_ids)
    if known is not None and known[0].size and (known[0].min() < -1 or known[0].max() >= pages.shape[0]):
        low, high = known[0].min(), known[0].max()
        raise ValueError(f"{op}: expected {name} in [-1, {pages.shape[0]}), got {low} ... {high}")


def check_copies(op: str, pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> None:
    """Raises ValueError unless the copies may be done in any order."""
    check_ids(op, "sources", pages, sources)
    check_ids(op, "destinations", pages, destinations)
    if sources.shape != destinations.shape:
        raise ValueError(f"{op}: expected as many sources as destinations, got {sources.size} and {destinations.size}")
    known = checks.concrete(sources, destinations)
    if known is None:
        return
    _check_distinct(op, "destinations", known[1])
    both = np.intersect1d(known[0], known[1][known[1] > 0])
    if both.size:
        raise ValueError(f"{op}: expected destinations that are no sources, got {both.tolist()} as both")


def check_values(op: str, pages: jax.Array, page_ids: jax.Array, values: jax.Array) -> None:
    """Raises ValueError unless there is a page of values, in the pages' dtype, for each id."""
    check_ids(op, "page_ids", pages, page_ids)
    checks.check_array(op, "values", values, (page_ids.shape[0], *pages.shape[1:]), "[n, *page_shape]")
    if checks.dtype_of(values) != pages.dtype:
        raise ValueError(f"{op}: expected values of the pages' dtype {pages.dtype}, got {jnp.result_type(values)}")
    known = checks.concrete(page_ids)
    if known is not None:
        _check_distinct(op, "page_ids", known[0])


def _check_distinct(op: str, name: str, page_ids: np.ndarray) -> None:
    ids, counts = np.unique(page_ids[page_ids > 0], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{op}: expected distinct {name}, got {ids[counts > 1].tolist()} more than once")

"""page_ops for TPU: DMAs between pages in HBM, one for each run of neighbouring pages on both sides.

Flow:    page ids -> runs (XLA) -> [kernel_tpu] -> pages, in place

Grid: one step, which starts the DMAs and waits for them. Reads and writes n pages. Zeros come from VMEM, a DMA for
each part of a page: page 0 may have been written by mistake.

Pages whose last dimension is not whole lanes, those of some recurrent states, XLA lays out with another dimension last:
a kernel would have the whole pool copied to its layout and back. XLA's gather and scatter move their rows in place.
Pages in slabs: `tpu_slabs`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_ops import reference, tpu_slabs
from pallas_kernels.page_ops.tpu_call import Refs, run_once
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.tpu.dma_runs import LARGEST_TABLE_ROWS, LONGEST_RUN_BYTES, copy_all, copy_runs
from pallas_kernels.tpu.mosaic import LANES, Copy
from pallas_kernels.tpu.slab_refs import reason_of_slab_rows

_ZERO_BYTES = 1 << 20  # of VMEM, so many that a DMA's fixed costs do not count


def reason_not_supported(pages: jax.Array, count: int) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    reason = reason_of_slab_rows(pages)
    if reason is not None:
        return reason
    if pages.ndim < 3 and not isinstance(pages, SlabArray):
        return f"TPU kernels move pages of at least two dimensions, got {pages.ndim - 1}"
    if pages.dtype == jnp.float16:
        return "TPU has no float16 pages; use bfloat16"
    if count > LARGEST_TABLE_ROWS:
        return f"TPU kernels move up to {LARGEST_TABLE_ROWS} pages a call, got {count}"
    return None


@jax.jit
def copy_pages(pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.copy_pages`."""
    if isinstance(pages, SlabArray):
        return tpu_slabs.copy_pages(pages, sources, destinations)
    if not _is_laid_out_by_page(pages):
        return reference.copy_pages(pages, sources, destinations)
    runs = copy_runs(destinations >= 1, jnp.maximum(sources, 0), destinations, _longest_run(pages))
    return _move(runs, None, pages, name="copy_pages")


@jax.jit
def zero_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.zero_pages`."""
    if isinstance(pages, SlabArray):
        return tpu_slabs.zero_pages(pages, page_ids)
    if not _is_laid_out_by_page(pages):
        return reference.zero_pages(pages, page_ids)
    if pages.size == 0 or page_ids.size == 0:
        return pages
    runs = copy_runs(page_ids >= 1, jnp.zeros_like(page_ids), page_ids)
    return _zero(runs, jnp.zeros(_zeros_shape(pages), pages.dtype), pages)


@jax.jit
def gather_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.gather_pages`."""
    if isinstance(pages, SlabArray):
        return tpu_slabs.gather_pages(pages, page_ids)
    if not _is_laid_out_by_page(pages):
        return reference.gather_pages(pages, page_ids)
    count = page_ids.shape[0]
    runs = copy_runs(
        jnp.ones(count, bool), jnp.maximum(page_ids, 0), jnp.arange(count, dtype=jnp.int32), _longest_run(pages)
    )
    return _move(runs, pages, jax.ShapeDtypeStruct((count, *pages.shape[1:]), pages.dtype), name="gather_pages")


@jax.jit
def scatter_pages(pages: jax.Array, page_ids: jax.Array, values: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.scatter_pages`."""
    if isinstance(pages, SlabArray):
        return tpu_slabs.scatter_pages(pages, page_ids, values)
    if not _is_laid_out_by_page(pages):
        return reference.scatter_pages(pages, page_ids, values)
    runs = copy_runs(page_ids >= 1, jnp.arange(page_ids.shape[0], dtype=jnp.int32), page_ids, _longest_run(pages))
    return _move(runs, values, pages, name="scatter_pages")


def _is_laid_out_by_page(pages: jax.Array) -> bool:
    """Whether XLA keeps the pages' last dimension last, so that a page is one piece of memory."""
    return pages.shape[-1] % LANES == 0


def _page_bytes(pages: jax.Array) -> int:
    return math.prod(pages.shape[1:]) * pages.dtype.itemsize


def _longest_run(pages: jax.Array) -> int:
    """Pages that one DMA moves at most."""
    return max(1, LONGEST_RUN_BYTES // max(1, _page_bytes(pages)))


def _zeros_shape(pages: jax.Array) -> tuple[int, ...]:
    """The shape of the largest part of a page, cut equally along its first dimension, that fits `_ZERO_BYTES`."""
    rows = pages.shape[1]
    fits = [n for n in range(1, rows + 1) if rows % n == 0 and _page_bytes(pages) // rows * n <= _ZERO_BYTES]
    return (max(fits, default=1), *pages.shape[2:])


def _zero(runs: jax.Array, zeros: jax.Array, pages: jax.Array) -> jax.Array:
    """`pages` with the targets of `runs`, a page each, zero."""
    size = zeros.shape[0]

    def body(refs: Refs) -> None:
        for first in range(0, pages.shape[1], size):

            def copy(_: jax.Array, to: jax.Array, __: jax.Array, first: int = first) -> Copy:
                return pltpu.make_async_copy(refs.zeros, refs.target.at[to, pl.ds(first, size)], refs.arrived)

            copy_all(refs.runs, copy)

    return run_once(body, runs, zeros, None, pages, name="zero_pages")


def _move(
    runs: jax.Array, source: jax.Array | None, target: jax.Array | jax.ShapeDtypeStruct, *, name: str
) -> jax.Array:
    """Copies runs of pages of `source` (None: of the target itself) to the target, which is updated where it exists."""
    if target.size == 0 or runs.shape[0] == 1:
        return target if isinstance(target, jax.Array) else jnp.zeros(target.shape, target.dtype)

    def body(refs: Refs) -> None:
        pages = refs.target if refs.source is None else refs.source

        def copy(first: jax.Array, to: jax.Array, count: jax.Array) -> Copy:
            moved = refs.target.at[pl.ds(to, count)]
            return pltpu.make_async_copy(pages.at[pl.ds(first, count)], moved, refs.arrived)

        copy_all(refs.runs, copy)

    return run_once(body, runs, None, source, target, name=name)

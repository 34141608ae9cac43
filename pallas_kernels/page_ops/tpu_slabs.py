"""page_ops for TPU of pages in slabs: a DMA of a page's rows of words each, whatever numbers they hold.

Flow:    page ids -> runs of one page (XLA) -> DMAs of rows -> the memory of the slabs, in place; or words -> numbers

XLA would go row by row: for a gather of several rows at a time it copies the memory to another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_ops.tpu_call import Refs, run_once
from pallas_kernels.slab_pages import SlabArray, numbers_of, words_of
from pallas_kernels.tpu.decode_states import largest_divisor
from pallas_kernels.tpu.dma_runs import copy_all, copy_runs
from pallas_kernels.tpu.mosaic import LANES, Copy, Ref

_ZERO_ROWS = 2048  # 1 MiB of VMEM


def copy_pages(pages: SlabArray, sources: jax.Array, destinations: jax.Array) -> SlabArray:
    """As `pallas_kernels.page_ops.copy_pages`."""

    def copy(refs: Refs, source: jax.Array, to: jax.Array) -> Copy:
        return pltpu.make_async_copy(_rows(pages, refs.target, source), _rows(pages, refs.target, to), refs.arrived)

    runs = copy_runs(destinations >= 1, jnp.maximum(sources, 0), destinations, 1)
    return _written(pages, runs, copy, name="copy_pages")


def zero_pages(pages: SlabArray, page_ids: jax.Array) -> SlabArray:
    """As `pallas_kernels.page_ops.zero_pages`."""
    size = largest_divisor(pages.place.num_rows, _ZERO_ROWS)

    def copy(refs: Refs, part: jax.Array, to: jax.Array) -> Copy:
        target = _rows(pages, refs.target, to).at[pl.ds(part * size, size)]
        return pltpu.make_async_copy(refs.zeros, target, refs.arrived)

    num_parts = pages.place.num_rows // size
    parts, ids = jnp.tile(jnp.arange(num_parts), page_ids.size), jnp.repeat(page_ids, num_parts)
    zeros = jnp.zeros((size, LANES), jnp.uint32)
    return _written(pages, copy_runs(ids >= 1, parts, ids, 1), copy, zeros=zeros, name="zero_pages")


def gather_pages(pages: SlabArray, page_ids: jax.Array) -> jax.Array:
    """As `pallas_kernels.page_ops.gather_pages`."""
    count, place = page_ids.size, pages.place
    if count == 0:
        return jnp.zeros((0, *place.page_shape), pages.dtype)

    def copy(refs: Refs, source: jax.Array, to: jax.Array) -> Copy:
        return pltpu.make_async_copy(_rows(pages, refs.source, source), refs.target.at[to], refs.arrived)

    runs = copy_runs(jnp.ones(count, bool), jnp.maximum(page_ids, 0), jnp.arange(count, dtype=jnp.int32), 1)
    words = jax.ShapeDtypeStruct((count, place.num_rows, LANES), jnp.uint32)
    gathered = run_once(_each(copy), runs, None, pages.memory, words, name="gather_pages")
    return numbers_of(gathered.reshape(count, -1), place, place.page_shape)


def scatter_pages(pages: SlabArray, page_ids: jax.Array, values: jax.Array) -> SlabArray:
    """As `pallas_kernels.page_ops.scatter_pages`."""

    def copy(refs: Refs, source: jax.Array, to: jax.Array) -> Copy:
        assert refs.source is not None
        return pltpu.make_async_copy(refs.source.at[source], _rows(pages, refs.target, to), refs.arrived)

    count, place = page_ids.size, pages.place
    words = words_of(values, place)
    words = jnp.pad(words, [(0, 0), (0, -words.shape[1] % LANES)])
    runs = copy_runs(page_ids >= 1, jnp.arange(count, dtype=jnp.int32), page_ids, 1)
    return _written(pages, runs, copy, source=words.reshape(count, -1, LANES), name="scatter_pages")


def _written(
    pages: SlabArray,
    runs: jax.Array,
    copy: Callable[[Refs, jax.Array, jax.Array], Copy],
    *,
    name: str,
    zeros: jax.Array | None = None,
    source: jax.Array | None = None,
) -> SlabArray:
    """The pages after the copies of all `runs`."""
    if runs.shape[0] == 1:
        return pages
    return replace(pages, memory=run_once(_each(copy), runs, zeros, source, pages.memory, name=name))


def _each(copy: Callable[[Refs, jax.Array, jax.Array], Copy]) -> Callable[[Refs], None]:
    """The kernel that makes the copies of all runs, each of one page."""
    return lambda refs: copy_all(refs.runs, lambda source, to, _: copy(refs, source, to))


def _rows(pages: SlabArray, memory: Ref, page: jax.Array) -> Ref:
    """The words of a page."""
    slab, row = pages.place.start_of(page)
    return memory.at[slab, pl.ds(row, pages.place.num_rows)]

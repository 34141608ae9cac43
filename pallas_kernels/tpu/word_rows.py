"""Rows of 32-bit words that several entries of a page share: new entries are merged into them, a DMA for each run.

Flow:    new entries + slots -> rows of words and which bits are new (XLA) -> [merge_rows] -> pages, in place

A DMA moves whole words, so entries are sorted by slot, those of one row are put together, and where a row is not new as
a whole, its other bits come from the pages. Every row has the same number of places, one after another from the lowest
bits of its words on, each for one entry.

Grid: one step per `CHUNK_ROWS` rows, as many as the call touches. A step reads and writes CHUNK_ROWS * pieces * 128
words; a run of rows inside a page is one DMA each way: a decode token one, the tokens of a prefill one a page.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layouts import cdiv
from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.dma_runs import copy_all, copy_runs
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Copy, Ref, load_row, store_row

CHUNK_ROWS = 256


class RowPlan(NamedTuple):
    """Rows of words that a call touches, R of them at most, in the order of their places in the pages."""

    runs: jax.Array  # int32[chunks * (3 * chunk + 1)] a table of `copy_runs` for each chunk of rows
    num_rows: jax.Array  # int32[]
    entries: jax.Array  # int32[R, places] the new entry at each place of a row, -1: the old one stays


def merge_rows(
    entries: jax.Array,  # [num_entries, pieces, packing / places, 128] the numbers of a place, in the pages' dtype
    pages: jax.Array,  # [pages, rows, pieces, packing, 128]; may lie in slabs
    slot_mapping: jax.Array,  # int32[num_entries] page * page_size + place, -1: skip
    *,
    page_size: int,  # entries of a page
    name: str,
) -> jax.Array:
    """The pages with every entry at its slot; slots of page 0 and -1 are skipped."""
    row_shape, (num_entries, *entry_shape) = pages.shape[2:], entries.shape
    places = row_shape[1] // entry_shape[1]
    chunk = min(CHUNK_ROWS, cdiv(num_entries, SUBLANES) * SUBLANES)
    plan = plan_rows(slot_mapping, page_size, pages.shape[1], places, chunk)
    rows = entries.reshape(num_entries, -1).at[plan.entries].get(mode="clip")
    rows = jnp.where(plan.entries[..., None] >= 0, rows, 0).reshape(-1, places, *entry_shape)
    return call(
        _merge,
        _Refs,
        name=name,
        grid=-(-plan.num_rows // chunk),
        scalars={"runs": plan.runs},
        inputs={
            "rows": Operand(
                rows.swapaxes(1, 2).reshape(-1, *row_shape),
                pl.BlockSpec((chunk, *row_shape), lambda i, _: (i, 0, 0, 0)),
            ),
            "old_bits": Operand(_old_bits(plan.entries), pl.BlockSpec((chunk, LANES), lambda i, _: (i, 0))),
        },
        outputs={},
        in_place={"pages": pages},
        scratch={"merged": pltpu.VMEM((chunk, *row_shape), pages.dtype), "arrived": pltpu.SemaphoreType.DMA},
        vmem_limit_bytes=16 << 20,
    )["pages"]


def plan_rows(slot_mapping: jax.Array, page_size: int, rows_per_page: int, places: int, chunk: int) -> RowPlan:
    """The rows of a slot mapping; slots of page 0 and -1 are skipped."""
    size = cdiv(slot_mapping.shape[0], chunk) * chunk
    order = jnp.argsort(slot_mapping)
    slot = slot_mapping[order]
    valid = slot >= page_size
    page, offset = slot // page_size, slot % page_size
    target = jnp.where(valid, page * rows_per_page + offset // places, -1)
    leads = valid & (target != jnp.concatenate([jnp.full(1, -1, jnp.int32), target[:-1]]))
    row = jnp.cumsum(leads, dtype=jnp.int32) - 1
    count = jnp.sum(leads, dtype=jnp.int32)
    entries = jnp.full((size, places), -1, jnp.int32)
    entries = entries.at[jnp.where(valid, row, size), offset % places].set(order.astype(jnp.int32), mode="drop")
    targets = jnp.zeros(size, jnp.int32).at[jnp.where(leads, row, size)].set(target, mode="drop")
    index = jnp.arange(size, dtype=jnp.int32)

    def runs(index: jax.Array, targets: jax.Array) -> jax.Array:
        return copy_runs(index < count, index % chunk, targets, rows_per_page)

    tables = jax.vmap(runs)(index.reshape(-1, chunk), targets.reshape(-1, chunk))
    return RowPlan(tables.reshape(-1), count, entries)


def _old_bits(entries: jax.Array) -> jax.Array:
    """uint32[R, 128]: the bits of a row's words that stay, in every lane, for `RowPlan.entries`."""
    width = 32 // entries.shape[1]
    bits = (jnp.uint32(0xFFFFFFFF) >> (32 - width)) << jnp.arange(0, 32, width, dtype=jnp.uint32)
    kept = jnp.sum(jnp.where(entries < 0, bits, 0), axis=1, dtype=jnp.uint32)
    return jnp.broadcast_to(kept[:, None], (entries.shape[0], LANES))


class _Refs(NamedTuple):
    """References of a chunk of rows."""

    runs: Ref  # SMEM int32[chunks * (3 * chunk + 1)] of `RowPlan`
    rows: Ref  # [chunk, pieces, packing, 128] new entries, 0 where the old one stays
    old_bits: Ref  # uint32[chunk, 128]
    pages: Ref  # HBM [pages, rows, pieces, packing, 128]
    merged: Ref  # [chunk, pieces, packing, 128]
    arrived: Ref  # DMA semaphore


def _merge(refs: _Refs) -> None:
    """One chunk of rows."""
    runs, rows, old_bits, pages, merged, arrived = refs
    chunk, rows_per_page = rows.shape[0], pages.shape[1]

    def places(first: jax.Array, target: jax.Array, count: jax.Array) -> tuple[Ref, Ref]:
        page = lax.div(target, rows_per_page)
        return merged.at[pl.ds(first, count)], pages.at[page, pl.ds(target - page * rows_per_page, count)]

    def read(*run: jax.Array) -> Copy:
        here, there = places(*run)
        return pltpu.make_async_copy(there, here, arrived)

    def write(*run: jax.Array) -> Copy:
        return pltpu.make_async_copy(*places(*run), arrived)

    table = pl.program_id(0) * (3 * chunk + 1)
    copy_all(runs, read, first=table, size=chunk)
    for piece in range(rows.shape[1]):
        old, new = (load_row(ref, (), 0, chunk, piece) for ref in (merged, rows))
        store_row(merged, piece, (old & old_bits[...]) | new)
    copy_all(runs, write, first=table, size=chunk)

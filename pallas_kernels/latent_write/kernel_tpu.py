"""latent_write for TPU: the rows of words that new states touch are read, merged and written back, a DMA for each run.

Flow:    new states -> rows of words and which bits are new (XLA) -> [kernel_tpu] -> pages, in place

On TPU `packing` states of a page share the 32-bit words of one row (`layouts.latent_layout`), and a DMA moves whole
words. So states are sorted by slot, those of one row are put together, and where a row is not new as a whole, its other
bits come from the pages.

Grid: one step per `CHUNK_ROWS` rows, as many as the call touches. A step reads and writes CHUNK_ROWS * lanes words; a
run of rows inside a page is one DMA each way: a decode token one, the tokens of a prefill one a page.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dma_runs import LARGEST_TABLE_ROWS, copy_all, copy_runs
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.layouts import cdiv
from pallas_kernels.mosaic import LANES, SUBLANES, Copy, Ref, compiler_params, load_words, store_words

CHUNK_ROWS = 256


def reason_not_supported(pages: tuple[jax.Array, ...], num_states: int) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if pages[0].ndim != 4:
        return "TPU kernels write packed latent pages; make them by latent_layout(platform='tpu')"
    if pages[0].dtype == jnp.float16:
        return "TPU has no arithmetic on float16 pages; use bfloat16"
    if num_states > LARGEST_TABLE_ROWS:
        return f"the TPU kernel writes up to {LARGEST_TABLE_ROWS} states a call, got {num_states}"
    return None


class RowPlan(NamedTuple):
    """Rows of words that a call touches, R of them at most, in the order of their places in the pages."""

    runs: jax.Array  # int32[chunks * (3 * chunk + 1)] a table of `copy_runs` for each chunk of rows
    num_rows: jax.Array  # int32[]
    states: jax.Array  # int32[R, packing] the new state at each place of a row, -1: the old one stays


@functools.partial(jax.jit, static_argnames=("entries", "page_size"))
def latent_write(
    states: jax.Array,  # [num_states, dim]
    pages: tuple[jax.Array, ...],  # packed: ([pages, rows, packing, lanes],)
    slot_mapping: jax.Array,  # int32[num_states]
    scale: jax.Array | None,
    *,
    entries: EntryFormat = Plain(),  # noqa: B008
    page_size: int,
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.latent_write.latent_write`."""
    if states.shape[0] == 0:
        return pages
    (latent,) = pages
    rows_per_page, packing, lanes = latent.shape[1:]
    values = entries.encode(states)
    values = LatentPages(latent, page_size, values.shape[-1]).as_stored(values, scale)
    chunk = min(CHUNK_ROWS, cdiv(states.shape[0], SUBLANES) * SUBLANES)
    plan = plan_rows(slot_mapping, page_size, rows_per_page, packing, chunk)
    rows = jnp.where(plan.states[..., None] >= 0, values.at[plan.states].get(mode="clip"), 0)
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-plan.num_rows // chunk),),
            in_specs=[
                pl.BlockSpec((chunk, packing, lanes), lambda i, _: (i, 0, 0)),
                pl.BlockSpec((chunk, LANES), lambda i, _: (i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.VMEM((chunk, packing, lanes), latent.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(latent.shape, latent.dtype),
        input_output_aliases={3: 0},
        compiler_params=compiler_params(16 << 20),
        name="latent_write",
    )(plan.runs, rows, _old_bits(plan.states), latent)
    return (written,)


def plan_rows(slot_mapping: jax.Array, page_size: int, rows_per_page: int, packing: int, chunk: int) -> RowPlan:
    """The rows of a slot mapping; slots of page 0 and -1 are skipped."""
    size = cdiv(slot_mapping.shape[0], chunk) * chunk
    order = jnp.argsort(slot_mapping)
    slot = slot_mapping[order]
    valid = slot >= page_size
    page, offset = slot // page_size, slot % page_size
    target = jnp.where(valid, page * rows_per_page + offset // packing, -1)
    leads = valid & (target != jnp.concatenate([jnp.full(1, -1, jnp.int32), target[:-1]]))
    row = jnp.cumsum(leads, dtype=jnp.int32) - 1
    count = jnp.sum(leads, dtype=jnp.int32)
    states = jnp.full((size, packing), -1, jnp.int32)
    states = states.at[jnp.where(valid, row, size), offset % packing].set(order.astype(jnp.int32), mode="drop")
    targets = jnp.zeros(size, jnp.int32).at[jnp.where(leads, row, size)].set(target, mode="drop")
    index = jnp.arange(size, dtype=jnp.int32)

    def runs(index: jax.Array, targets: jax.Array) -> jax.Array:
        return copy_runs(index < count, index % chunk, targets, rows_per_page)

    tables = jax.vmap(runs)(index.reshape(-1, chunk), targets.reshape(-1, chunk))
    return RowPlan(tables.reshape(-1), count, states)


def _old_bits(states: jax.Array) -> jax.Array:
    """uint32[R, 128]: the bits of a row's words that stay, in every lane, for `RowPlan.states`."""
    packing = states.shape[1]
    ones = jnp.uint32(0xFFFFFFFF) >> (32 - 32 // packing)
    bits = ones << jnp.arange(0, 32, 32 // packing, dtype=jnp.uint32)
    kept = jnp.sum(jnp.where(states < 0, bits, 0), axis=1, dtype=jnp.uint32)
    return jnp.broadcast_to(kept[:, None], (states.shape[0], LANES))


def _kernel(runs: Ref, rows: Ref, old_bits: Ref, _: Ref, pages: Ref, merged: Ref, arrived: Ref) -> None:
    """One chunk of rows."""
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
    stays = jnp.concatenate([old_bits[...]] * (rows.shape[2] // LANES), axis=1)
    store_words(merged, (load_words(merged) & stays) | load_words(rows))
    copy_all(runs, write, first=table, size=chunk)

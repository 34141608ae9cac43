"""kv_write for TPU: DMAs from the new rows to their slots, one for each run of slots inside a page.

Flow:    new K, V -> rows as the pages hold them (XLA) -> [kernel_tpu] -> pages, in place

Grid: one step. Reads and writes T * rows * packing * 128 elements; a run of prefill tokens is one DMA a page, a decode
token one DMA. Where tokens share rows of words (`layouts.tokens_per_row`), those are read, merged and written back
instead, by `tpu.word_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.checks import page_tokens
from pallas_kernels.kv_write import reference
from pallas_kernels.slab_pages import replaced
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.dma_runs import LARGEST_TABLE_ROWS, copy_all, copy_runs
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Copy, Ref
from pallas_kernels.tpu.slab_refs import reason_of_slabs
from pallas_kernels.tpu.word_rows import merge_rows


def reason_not_supported(pages: tuple[jax.Array, ...], num_tokens: int) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if len(pages) != 1:
        return "TPU kernels write packed pages (kv,); make them by attention_layout(platform='tpu')"
    if pages[0].dtype == jnp.float16:
        return "TPU has no arithmetic on float16 pages; use bfloat16"
    if num_tokens > LARGEST_TABLE_ROWS:
        return f"the TPU kernel writes up to {LARGEST_TABLE_ROWS} tokens a call, got {num_tokens}"
    return reason_of_slabs(pages[0])


@jax.jit
def kv_write(
    new_k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    new_v: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    pages: tuple[jax.Array, ...],  # packed: ([pages, page_size / tokens a row, rows, packing, 128],)
    slot_mapping: jax.Array,  # int32[num_tokens]
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.kv_write.kv_write`."""
    num_tokens = new_k.shape[0]
    if num_tokens == 0:
        return pages
    (kv,) = pages
    rows = reference.packed_rows(new_k, new_v, kv, k_scale, v_scale)
    page_size = page_tokens(pages, new_k.shape[1])
    if page_size != kv.shape[1]:
        return replaced(pages, 0, merge_rows(rows, kv, slot_mapping, page_size=page_size, name="kv_write"))
    results = call(
        lambda refs: copy_rows(refs.runs, refs.rows, refs.pages, refs.arrived),
        _Refs,
        name="kv_write",
        grid=1,
        scalars={"runs": write_runs(slot_mapping, kv.shape[1])},
        inputs={"rows": Operand(rows, IN_HBM)},
        outputs={},
        in_place={"pages": kv},
        scratch={"arrived": pltpu.SemaphoreType.DMA},
        vmem_limit_bytes=4 << 20,
    )
    return replaced(pages, 0, results["pages"])


class _Refs(NamedTuple):
    """References of the one step."""

    runs: Ref  # SMEM int32[3 * T + 1] of `copy_runs`
    rows: Ref  # HBM [T, rows, packing, 128]
    pages: Ref  # HBM [pages, page_size, rows, packing, 128]
    arrived: Ref  # DMA semaphore


def write_runs(slot_mapping: jax.Array, page_size: int) -> jax.Array:
    """Table of the runs of a slot mapping; slots of page 0 and -1 are skipped."""
    tokens = jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    return copy_runs(slot_mapping >= page_size, tokens, slot_mapping, page_size)


def written_pages(slot_mapping: jax.Array, page_size: int) -> jax.Array:
    """int32[n, 128], n a multiple of 8: the page of every slot that `write_runs` has, -1 in other places."""
    pages = jnp.where(slot_mapping >= page_size, slot_mapping // page_size, -1)
    padding = -pages.shape[0] % (SUBLANES * LANES)
    return jnp.pad(pages, (0, padding), constant_values=-1).reshape(-1, LANES)


def copy_rows(runs: Ref, rows: Ref, pages: Ref, arrived: Ref, meanwhile: Callable[[], Any] | None = None) -> Any:
    """In a kernel: writes all runs of `rows` [T, rows, packing, 128] to their slots of `pages`.

    `meanwhile` runs while they are under way, see `copy_all`.
    """
    page_size = pages.shape[1]

    def copy(token: jax.Array, slot: jax.Array, count: jax.Array) -> Copy:
        page = lax.div(slot, page_size)
        target = pages.at[page, pl.ds(slot - page * page_size, count)]
        return pltpu.make_async_copy(rows.at[pl.ds(token, count)], target, arrived)

    return copy_all(runs, copy, meanwhile=meanwhile)

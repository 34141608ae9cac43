"""kv_write for TPU: DMAs from the new rows to their slots, one for each run of slots inside a page.

Flow:    new K, V -> rows as the pages hold them (XLA) -> [kernel_tpu] -> pages, in place

Grid: one step. Reads and writes T * rows * lanes elements; a run of prefill tokens is one DMA a page, a decode token
one DMA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dma_runs import LARGEST_TABLE_ROWS, copy_all, copy_runs
from pallas_kernels.kv_write import reference
from pallas_kernels.mosaic import Copy, Ref, compiler_params


def reason_not_supported(pages: tuple[jax.Array, ...], num_tokens: int) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if len(pages) != 1:
        return "TPU kernels write packed pages (kv,); make them by attention_layout(platform='tpu')"
    if pages[0].dtype == jnp.float16:
        return "TPU has no arithmetic on float16 pages; use bfloat16"
    if num_tokens > LARGEST_TABLE_ROWS:
        return f"the TPU kernel writes up to {LARGEST_TABLE_ROWS} tokens a call, got {num_tokens}"
    return None


@jax.jit
def kv_write(
    new_k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    new_v: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    pages: tuple[jax.Array, ...],  # packed: ([pages, page_size, rows, packing, lanes],)
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
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={2: 0},
        compiler_params=compiler_params(4 << 20),
        name="kv_write",
    )(write_runs(slot_mapping, kv.shape[1]), rows, kv)
    return (written,)


def write_runs(slot_mapping: jax.Array, page_size: int) -> jax.Array:
    """Table of the runs of a slot mapping; slots of page 0 and -1 are skipped."""
    tokens = jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    return copy_runs(slot_mapping >= page_size, tokens, slot_mapping, page_size)


def copy_rows(runs: Ref, rows: Ref, pages: Ref, arrived: Ref) -> None:
    """In a kernel: writes all runs of `rows` [T, rows, packing, lanes] to their slots of `pages`."""
    page_size = pages.shape[1]

    def copy(token: jax.Array, slot: jax.Array, count: jax.Array) -> Copy:
        page = lax.div(slot, page_size)
        target = pages.at[page, pl.ds(slot - page * page_size, count)]
        return pltpu.make_async_copy(rows.at[pl.ds(token, count)], target, arrived)

    copy_all(runs, copy)


def _kernel(runs: Ref, rows: Ref, _: Ref, pages: Ref, arrived: Ref) -> None:
    copy_rows(runs, rows, pages, arrived)

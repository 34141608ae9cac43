"""latent_write for TPU: the rows of words that new states touch are read, merged and written back.

Flow:    new states -> states as the pages hold them (XLA) -> [kernel_tpu] -> pages, in place

On TPU `packing` states of a page share the 32-bit words of one row (`layouts.latent_layout`): `tpu.word_rows` merges
them, a DMA each way for each run of rows inside a page.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.slab_pages import replaced
from pallas_kernels.tpu.dma_runs import LARGEST_TABLE_ROWS
from pallas_kernels.tpu.slab_refs import reason_of_slabs
from pallas_kernels.tpu.word_rows import merge_rows


def reason_not_supported(pages: tuple[jax.Array, ...], num_states: int) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if pages[0].ndim != 5:
        return "TPU kernels write packed latent pages; make them by latent_layout(platform='tpu')"
    if pages[0].dtype == jnp.float16:
        return "TPU has no arithmetic on float16 pages; use bfloat16"
    if num_states > LARGEST_TABLE_ROWS:
        return f"the TPU kernel writes up to {LARGEST_TABLE_ROWS} states a call, got {num_states}"
    return reason_of_slabs(pages[0])


@functools.partial(jax.jit, static_argnames=("entries", "page_size"))
def latent_write(
    states: jax.Array,  # [num_states, dim]
    pages: tuple[jax.Array, ...],  # packed: ([pages, rows, pieces, packing, 128],)
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
    values = entries.encode(states)
    values = LatentPages(latent, page_size, values.shape[-1]).as_stored(values, scale)
    written = merge_rows(values[:, :, None], latent, slot_mapping, page_size=page_size, name="latent_write")
    return replaced(pages, 0, written)

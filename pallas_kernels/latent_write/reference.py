"""latent_write in plain jnp: the specification, and the CPU path; in place as `kv_write.reference` is."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.slab_pages import replaced


@functools.partial(jax.jit, static_argnames=("entries", "page_size"))
def latent_write(
    states: jax.Array,  # [num_states, dim]
    pages: tuple[jax.Array, ...],
    slot_mapping: jax.Array,  # int32[num_states]
    scale: jax.Array | None,
    *,
    entries: EntryFormat = Plain(),  # noqa: B008
    page_size: int,
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.latent_write.latent_write`."""
    rows = entries.encode(states)
    return replaced(pages, 0, LatentPages(pages[0], page_size, rows.shape[-1]).write(rows, slot_mapping, scale))

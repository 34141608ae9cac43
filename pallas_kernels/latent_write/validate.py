"""Checks of latent_write's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_pages import check_entry_pages

OP = "latent_write"


def check(
    states: jax.Array,
    pages: tuple[jax.Array, ...],
    slot_mapping: jax.Array,
    scale: Any,
    entries: EntryFormat,
    page_size: int | None,
) -> int:
    """States of a page.

    Raises:
        ValueError: an argument does not fit; nothing has been written then.
    """
    checks.check_array(OP, "states", states, (None, None), "[num_states, dim]")
    checks.check_floating(OP, "states", states)
    latent = check_entry_pages(OP, "pages", pages, states.shape[1], entries, page_size)
    checks.check_array(OP, "slot_mapping", slot_mapping, (states.shape[0],), "[num_states]")
    checks.check_int32(OP, "slot_mapping", slot_mapping)
    checks.check_scale(OP, "scale", scale)
    if scale is not None and entries != Plain():
        raise ValueError(f"{OP}: expected scale None, since entries {entries} have scales of their own")
    known = checks.concrete(slot_mapping)
    if known is not None:
        checks.check_slots(OP, known[0], latent.array.shape[0] * latent.page_size)
    return latent.page_size

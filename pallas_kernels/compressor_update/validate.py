"""Checks of compressor_update's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention_checks, checks
from pallas_kernels.latent_pages import check_latent_pages

OP = "compressor_update"


def check(
    kv: jax.Array,
    scores: jax.Array,
    pages: Any,
    step: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    slot_mapping: jax.Array,
    position_bias: jax.Array,
    overlap: Any,
    page_size: int | None,
) -> int:
    """States of a page.

    Raises:
        ValueError: an argument does not fit; nothing has been written then.
    """
    if not isinstance(overlap, bool):
        raise ValueError(f"{OP}: expected overlap to be True or False, got {overlap!r}")
    checks.check_array(OP, "kv", kv, (None, None), "[num_tokens, coff * dim]")
    num_tokens, width = kv.shape
    if not kv.size or (overlap and width % 2):
        raise ValueError(f"{OP}: expected kv of tokens and of an even width with overlap, got {kv.shape}")
    checks.check_floating(OP, "kv", kv)
    checks.check_array(OP, "scores", scores, (num_tokens, width), "[num_tokens, coff * dim] as kv")
    checks.check_floating(OP, "scores", scores)
    checks.check_array(OP, "position_bias", position_bias, (None, width), "[tokens_per_state, coff * dim]")
    checks.check_floating(OP, "position_bias", position_bias)
    checks.check_at_least(OP, "tokens_per_state, the rows of position_bias,", position_bias.shape[0], 1)
    latent = check_latent_pages(OP, "pages", pages, 2 * width, page_size)
    if latent.array.dtype != jnp.float32:
        raise ValueError(f"{OP}: expected pages of dtype float32, got {latent.array.dtype}")
    attention_checks.check_batch(OP, num_tokens, latent.page_size, *step)
    checks.check_array(OP, "slot_mapping", slot_mapping, (num_tokens,), "[num_tokens]")
    checks.check_int32(OP, "slot_mapping", slot_mapping)
    known = checks.concrete(slot_mapping)
    if known is not None:
        checks.check_slots(OP, known[0], latent.array.shape[0] * latent.page_size)
    return latent.page_size

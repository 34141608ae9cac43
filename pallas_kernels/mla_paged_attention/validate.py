"""Checks of mla_paged_attention's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels.latent_pages import LatentPages, check_latent_pages

OP = "mla_paged_attention"


def check_latents(q_nope: jax.Array, q_pe: jax.Array, pages: Any, page_size: int | None) -> LatentPages:
    """The pages.

    Raises:
        ValueError: both parts of the queries and the pages do not go together.
    """
    checks.check_array(OP, "q_nope", q_nope, (None, None, None), "[num_tokens, num_q_heads, latent_dim]")
    num_tokens, num_q_heads, latent_dim = q_nope.shape
    checks.check_array(OP, "q_pe", q_pe, (num_tokens, num_q_heads, None), "[num_tokens, num_q_heads, rope_dim]")
    if q_nope.size == 0 or q_pe.size == 0:
        raise ValueError(f"{OP}: expected at least one token, head and number, got {q_nope.shape} and {q_pe.shape}")
    checks.check_floating(OP, "q_nope", q_nope)
    if jnp.result_type(q_pe) != jnp.result_type(q_nope):
        raise ValueError(f"{OP}: expected q_pe of dtype {q_nope.dtype} as q_nope, got {q_pe.dtype}")
    return check_latent_pages(OP, "pages", pages, latent_dim + q_pe.shape[-1], page_size)


def check_new_kv(q_nope: jax.Array, q_pe: jax.Array, new_kv: Any, slot_mapping: Any, latent: LatentPages) -> None:
    """Raises ValueError unless new latents, rotated keys and their slots come together, one per query token."""
    if (new_kv is None) != (slot_mapping is None):
        missing, given = ("slot_mapping", "new_kv") if slot_mapping is None else ("new_kv", "slot_mapping")
        raise ValueError(f"{OP}: expected {missing} along with {given}, got None; pass both or neither")
    if new_kv is None:
        return
    if not isinstance(new_kv, tuple | list) or len(new_kv) != 2:
        raise ValueError(f"{OP}: expected new_kv to be a pair (latent, rotated key), got {type(new_kv).__name__}")
    num_tokens = q_nope.shape[0]
    for i, dim in enumerate((q_nope.shape[-1], q_pe.shape[-1])):
        checks.check_array(OP, f"new_kv[{i}]", new_kv[i], (num_tokens, dim), "[num_tokens, dim] as the queries'")
        checks.check_floating(OP, f"new_kv[{i}]", new_kv[i])
    if jnp.result_type(new_kv[0]) != jnp.result_type(new_kv[1]):
        raise ValueError(f"{OP}: expected new_kv of one dtype, got {new_kv[0].dtype} and {new_kv[1].dtype}")
    checks.check_array(OP, "slot_mapping", slot_mapping, (num_tokens,), "[num_tokens]")
    checks.check_int32(OP, "slot_mapping", slot_mapping)
    known = checks.concrete(slot_mapping)
    if known is not None:
        checks.check_slots(OP, known[0], latent.array.shape[0] * latent.page_size)


def check_per_head(num_q_heads: int, sinks: Any, k_scale: Any) -> None:
    """Raises ValueError where sinks or the scale do not fit."""
    if sinks is not None:
        checks.check_array(OP, "sinks", sinks, (num_q_heads,), "[num_q_heads]")
        checks.check_floating(OP, "sinks", sinks)
    checks.check_scale(OP, "k_scale", k_scale)

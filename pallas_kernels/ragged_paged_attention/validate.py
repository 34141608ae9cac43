"""Checks of ragged_paged_attention's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels import checks

OP = "ragged_paged_attention"


def check_heads(
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    new_kv: tuple[jax.Array, jax.Array] | None,
    num_kv_heads: int | None,
) -> int:
    """Number of KV heads.

    Raises:
        ValueError: q, the pages, `new_kv` and `num_kv_heads` do not go together.
    """
    checks.check_array(OP, "q", q, (None, None, None), "[num_tokens, num_q_heads, head_dim]")
    checks.check_floating(OP, "q", q)
    checks.check_pages(OP, pages)
    if num_kv_heads is None and new_kv is not None and np.ndim(new_kv[0]) == 3:
        num_kv_heads = new_kv[0].shape[1]
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = checks.resolve_kv_heads(OP, pages, head_dim, num_kv_heads)
    if len(pages) == 2 and head_dim != pages[0].shape[-1]:
        raise ValueError(f"{OP}: expected q's head_dim as the K pages' {pages[0].shape[-1]}, got {head_dim}")
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{OP}: expected a multiple of {num_kv_heads} KV heads as query heads, got {num_q_heads}")
    if num_tokens < 1:
        raise ValueError(f"{OP}: expected at least one query token, got q of shape {q.shape}; pad the batch")
    return num_kv_heads


def check_per_head(num_q_heads: int, num_kv_heads: int, sinks: Any, k_scale: Any, v_scale: Any) -> None:
    """Raises ValueError where sinks or scales do not fit the heads."""
    if sinks is not None:
        checks.check_array(OP, "sinks", sinks, (num_q_heads,), "[num_q_heads]")
        checks.check_floating(OP, "sinks", sinks)
    checks.check_scale(OP, "k_scale", k_scale, num_kv_heads)
    checks.check_scale(OP, "v_scale", v_scale, num_kv_heads)


def check_new_kv(q: jax.Array, new_kv: Any, slot_mapping: Any) -> None:
    """Raises ValueError unless new KV and its slots come together, one per query token."""
    if (new_kv is None) != (slot_mapping is None):
        missing, given = ("slot_mapping", "new_kv") if slot_mapping is None else ("new_kv", "slot_mapping")
        raise ValueError(f"{OP}: expected {missing} along with {given}, got None; pass both or neither")
    if new_kv is not None:
        if not isinstance(new_kv, tuple | list) or len(new_kv) != 2:
            raise ValueError(f"{OP}: expected new_kv to be a pair (k, v), got {type(new_kv).__name__}")
        shape = (np.shape(q)[0] if np.ndim(q) else None, None, None)
        checks.check_array(OP, "new_kv[0]", new_kv[0], shape, "[num_tokens, num_kv_heads, head_dim]")

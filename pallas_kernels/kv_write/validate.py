"""Checks of kv_write's arguments: static ones always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks

OP = "kv_write"


def check(
    new_k: jax.Array,
    new_v: jax.Array,
    pages: tuple[jax.Array, ...],
    slot_mapping: jax.Array,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Raises ValueError where an argument does not fit; nothing has been written then."""
    checks.check_pages(OP, pages)
    checks.check_array(OP, "new_k", new_k, (None, None, None), "[num_tokens, num_kv_heads, head_dim]")
    num_tokens, num_kv_heads, head_dim = new_k.shape
    heads = checks.resolve_kv_heads(OP, pages, head_dim, num_kv_heads if len(pages) == 1 else None)
    head_dims = [array.shape[-1] for array in pages] if len(pages) == 2 else [head_dim, head_dim]
    axes = "[num_tokens, num_kv_heads, head_dim] as the pages hold"
    checks.check_array(OP, "new_k", new_k, (num_tokens, heads, head_dims[0]), axes)
    checks.check_array(OP, "new_v", new_v, (num_tokens, heads, head_dims[1]), axes)
    checks.check_floating(OP, "new_k", new_k)
    checks.check_floating(OP, "new_v", new_v)
    checks.check_array(OP, "slot_mapping", slot_mapping, (num_tokens,), "[num_tokens]")
    checks.check_int32(OP, "slot_mapping", slot_mapping)
    checks.check_scale(OP, "k_scale", k_scale, heads)
    checks.check_scale(OP, "v_scale", v_scale, heads)
    known = checks.concrete(slot_mapping)
    if known is not None:
        checks.check_slots(OP, known[0], pages[0].shape[0] * checks.page_tokens(pages, heads))

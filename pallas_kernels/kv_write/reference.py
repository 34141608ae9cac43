"""kv_write in plain jnp: the specification, and the CPU path."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _store(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """`x / scale` in the pages' dtype; scale is [] or [num_kv_heads]."""
    x = x.astype(jnp.float32)
    if scale is not None:
        x = x / jnp.asarray(scale, jnp.float32).reshape(-1, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        x = jnp.clip(jnp.round(x), info.min, info.max)
    return x.astype(dtype)


def kv_write(
    new_k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    new_v: jax.Array,  # [num_tokens, num_kv_heads, head_dim_v]
    pages: tuple[jax.Array, ...],
    slot_mapping: jax.Array,  # int32[num_tokens]
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.kv_write.kv_write`."""
    num_pages, page_size = pages[0].shape[:2]
    page = jnp.where(slot_mapping < page_size, num_pages, slot_mapping // page_size)  # out of range: dropped
    offset = slot_mapping % page_size
    dtype = pages[0].dtype
    k, v = _store(new_k, k_scale, dtype), _store(new_v, v_scale, pages[-1].dtype)
    if len(pages) == 2:
        return tuple(p.at[page, offset].set(x, mode="drop") for p, x in zip(pages, (k, v), strict=True))
    (packed,) = pages
    rows = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1])  # K0, V0, K1, V1, ...
    padding = [
        (0, 0),
        (0, packed.shape[2] * packed.shape[3] - rows.shape[1]),
        (0, packed.shape[4] - rows.shape[2]),
    ]
    rows = jnp.pad(rows, padding).reshape(-1, *packed.shape[2:])
    return (packed.at[page, offset].set(rows, mode="drop"),)

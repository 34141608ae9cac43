"""kv_write in plain jnp: the specification, and the CPU path.

In place where the caller donates the pages. On CPU that holds for float32, float16, int8 and, with current jax,
bfloat16: XLA for CPU has no scatter of float8 (jax 0.10: of bfloat16) and converts the whole array there and back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.jit
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
    if len(pages) == 2:
        rows: tuple[jax.Array, ...] = (stored(new_k, k_scale, pages[0].dtype), stored(new_v, v_scale, pages[1].dtype))
    else:
        rows = (packed_rows(new_k, new_v, pages[0], k_scale, v_scale),)
    return tuple(p.at[page, offset].set(x, mode="drop") for p, x in zip(pages, rows, strict=True))


def packed_rows(
    new_k: jax.Array, new_v: jax.Array, pages: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> jax.Array:
    """New K and V as packed pages hold them, [num_tokens, rows, packing, lanes]."""
    k, v = stored(new_k, k_scale, pages.dtype), stored(new_v, v_scale, pages.dtype)
    return _packed(k, v, pages.shape[2:])


def stored(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """`x / scale` in the pages' dtype, saturated to it where it has 8 bits; scale is [] or [num_kv_heads]."""
    if scale is not None:
        x = x.astype(jnp.float32) / jnp.asarray(scale, jnp.float32).reshape(1, -1, 1)
    if dtype.itemsize > 1:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(jnp.where(jnp.isnan(x), 0.0, x)), info.min, info.max).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _packed(k: jax.Array, v: jax.Array, token_shape: tuple[int, ...]) -> jax.Array:
    """Rows K0, V0, K1, V1, ... of each token, padded with zeros to `token_shape` (rows, packing, lanes)."""
    rows = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1])
    num_rows, packing, lanes = token_shape
    padding = [(0, 0), (0, num_rows * packing - rows.shape[1]), (0, lanes - rows.shape[2])]
    return jnp.pad(rows, padding).reshape(-1, *token_shape)

"""Numbers as pages keep them: scaled, rounded, saturated.

Flow:    keys, values, latents of new tokens -> [stored] -> entries of pages
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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

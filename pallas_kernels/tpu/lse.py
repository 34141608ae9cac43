"""LSE of TPU kernels in HBM: a number per head in each lane, 4 bytes a head instead of 512.

Flow:    a number in all lanes of each head's row -> [heads_to_lanes] -> float32[T, rows, 128] in HBM -> [by_head]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tpu.mosaic import LANES


def lse_shape(num_tokens: int, num_heads: int) -> tuple[int, int, int]:
    """[T, rows, 128]: rows of 128 heads each. A token is whole tiles, so that DMAs may start at any."""
    return (num_tokens, -(-num_heads // LANES), LANES)


def heads_to_lanes(x: jax.Array) -> jax.Array:
    """float32[tokens, rows, 128] of [tokens, heads, 128], equal in all lanes; lanes without a head are 0."""
    rows = []
    for first in range(0, x.shape[1], LANES):
        part = x[:, first : first + LANES]
        own = lax.broadcasted_iota(jnp.int32, part.shape, 1) == lax.broadcasted_iota(jnp.int32, part.shape, 2)
        rows.append(jnp.sum(jnp.where(own, part, 0.0), axis=1, keepdims=True))
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def by_head(lse: jax.Array, num_heads: int) -> jax.Array:
    """float32[T, num_heads] of [T, rows, 128]."""
    return lse.reshape(lse.shape[0], -1)[:, :num_heads]

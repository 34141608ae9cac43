"""Norms over the last axis.

Flow:    x[..., size] -> [RMSNorm | LayerNorm] -> [..., size]
Source:  arXiv 1910.07467, arXiv 1607.06450
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """`x / rms(x) * (scale + offset)` over the last axis; Gemma stores the scale less one."""

    def __init__(self, size: int, *, eps: float, offset: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, dtype))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size]
        """Normed `x`, computed in float32, in the dtype of `x`."""
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (rms_normed(x, self.eps) * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rms_normed(x: jax.Array, eps: float) -> jax.Array:  # [..., size] -> float32[..., size]
    """`x / rms(x)` over the last axis."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / std(x) * weight + bias` over the last axis; some have no bias.

    With `num_heads` the axis before has weights of each head's own.
    """

    def __init__(
        self, size: int, *, eps: float, dtype: jnp.dtype, has_bias: bool = True, num_heads: int | None = None
    ) -> None:
        shape = (size,) if num_heads is None else (num_heads, size)
        self.scale = nnx.Param(jnp.ones(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if has_bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] or [..., num_heads, size]
        """Normed `x`, computed in float32, in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        before = range(x.ndim - self.scale[...].ndim)
        out = normed * jnp.expand_dims(self.scale[...].astype(jnp.float32), before)
        if self.bias is not None:
            out = out + jnp.expand_dims(self.bias[...].astype(jnp.float32), before)
        return out.astype(x.dtype)


Norm: TypeAlias = RMSNorm | LayerNorm

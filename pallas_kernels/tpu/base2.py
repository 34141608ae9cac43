"""Logits in base 2, and matrix products of blocks, as the softmaxes of TPU kernels take them.

Flow:    raw scores of a block -> [base2_logits] -> `tpu.softmax`;  blocks -> [dot] -> float32
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

HIDDEN = -1e30  # score of a key that a row does not see
NOTHING = -1e29  # m of a row that has seen nothing: exp2(HIDDEN - NOTHING) is 0
LOG2E = math.log2(math.e)


def base2_logits(s: jax.Array, sm_scale: float, soft_cap: float | None, k_scale: jax.Array | None) -> jax.Array:
    """Logits, times log2(e), of raw scores [rows, keys]; `k_scale` float32[rows, 128], equal in all lanes."""
    scale = sm_scale * LOG2E if soft_cap is None else sm_scale / soft_cap
    s = s * (scale if k_scale is None else spread(k_scale * scale, s.shape[1]))
    return s if soft_cap is None else jnp.tanh(s) * (soft_cap * LOG2E)


def spread(x: jax.Array, count: int, axis: int = 1) -> jax.Array:
    """A row's number, equal along `axis`, in `count` places of it."""
    size = x.shape[axis]
    return x if count == size else jnp.concatenate([x] * (count // size), axis=axis)


def dot(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    """`lax.dot_general` of blocks in their own precision, float32 in all its bits, summed in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

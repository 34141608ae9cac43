"""Online softmax of TPU kernels: where a row's state begins, what further keys do to it, and what it comes to.

Flow:    logits of a part of the keys -> [largest], [weights], [add_weights] -> m, weight of each row
         -> [sums], [inverse] -> factors of the results, [natural_lse]
Source:  FlashAttention (arXiv 2205.14135), in base 2

Rows stand in sublanes and keys in lanes (`axis` 1, that of the keys), or rows in lanes and keys in sublanes (`axis` 0).
A row's largest logit `m` stands in all 128 lanes, or all 8 sublanes, and its weight is a sum for each of these, so that
the loop over keys needs no broadcast and no sum within a register. A kernel keeps the state where it likes, in m before
the weights are made, and adds up values itself, at a time of its own: the order costs bundles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tpu.base2 import LOG2E, NOTHING, spread
from pallas_kernels.tpu.mosaic import LANES, SUBLANES

_STEP = {1: LANES, 0: SUBLANES}  # in how many numbers a row's state stands


def sink_m(sinks: jax.Array) -> jax.Array:
    """m of rows that have seen only their sink, a base-2 logit, or nothing where that is -inf."""
    return jnp.maximum(sinks, NOTHING)


def sink_weight(sinks: jax.Array, axis: int = 1) -> jax.Array:
    """Their weight."""
    return jnp.where(sinks > NOTHING, 1.0 / _STEP[axis], 0.0)


def largest(s: jax.Array, m: jax.Array, axis: int = 1) -> jax.Array:
    """m after further logits [rows, keys], or [keys, rows]."""
    return jnp.maximum(m, jnp.max(s, axis=axis, keepdims=True))


def weights(s: jax.Array, old: jax.Array, new: jax.Array, axis: int = 1) -> tuple[jax.Array, jax.Array]:
    """(weights of the keys, what the weights and values of the keys before shrink by) for m before and after."""
    return jnp.exp2(s - spread(new, s.shape[axis], axis)), jnp.exp2(old - new)


def add_weights(weight: jax.Array, shrink: jax.Array, p: jax.Array, axis: int = 1) -> jax.Array:
    """The rows' weight with that of further keys."""
    step = _STEP[axis]
    pieces = (p[:, n : n + step] if axis else p[n : n + step] for n in range(0, p.shape[axis], step))
    return shrink * weight + sum(pieces)


def sums(weight: jax.Array, axis: int = 1) -> jax.Array:
    """Weights summed over the places that they stand in, in all of them."""
    return jnp.broadcast_to(jnp.sum(weight, axis=axis, keepdims=True), weight.shape)


def inverse(total: jax.Array) -> jax.Array:
    """1 / total, or 0 for rows that have seen nothing."""
    return jnp.where(total == 0, 0.0, 1.0 / total)


def natural_lse(m: jax.Array, total: jax.Array) -> jax.Array:
    """log(sum of exp(logits)) of rows: -inf where they have seen nothing."""
    return (m + jnp.log2(total)) * (1 / LOG2E)

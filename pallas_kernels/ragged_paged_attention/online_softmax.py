"""Softmax over keys that come in parts: state, one part, merge, result.

Flow:    scores of a KV tile -> [attend] -> [merge] -> ... -> [finish] -> out, lse
Source:  online softmax of FlashAttention (arXiv 2205.14135); sinks as GPT-OSS: one more logit without a value

A sink starts the sum: `m = sink, l = 1`, so that nothing is ever raised to `sink - m` afterwards, which overflows.
All arrays are float32; leading axes are free.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class SoftmaxState(NamedTuple):
    """Softmax over the keys seen so far: `out = acc / l`, `lse = m + log(l)`."""

    m: jax.Array  # [..., rows] largest logit, -inf before the first
    l: jax.Array  # [..., rows] sum of exp(logit - m)  # noqa: E741
    acc: jax.Array  # [..., rows, dim] sum of exp(logit - m) * value


def _finite(m: jax.Array) -> jax.Array:
    """`m`, or 0 where it is -inf: `exp(x - m)` then is 0 and not NaN for a row that has seen nothing."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def start(sinks: jax.Array, dim: int) -> SoftmaxState:
    """State before any key; `sinks` float32[..., rows] are the sink logits, -inf for none."""
    seen = jnp.where(sinks == -jnp.inf, 0.0, 1.0)
    return SoftmaxState(sinks, seen, jnp.zeros((*sinks.shape, dim), jnp.float32))


def attend(
    q: jax.Array,  # float32[..., rows, head_dim], scaled
    k: jax.Array,  # float32[..., keys, head_dim]
    v: jax.Array,  # float32[..., keys, head_dim_v], finite where no row sees the key
    visible: jax.Array,  # bool[..., rows, keys], broadcast
    soft_cap: float | None,
) -> SoftmaxState:
    """State of one part of the keys by itself."""
    s = jnp.einsum("...md,...kd->...mk", q, k, precision=lax.Precision.HIGHEST)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible, s, -jnp.inf)
    m = jnp.max(s, axis=-1)
    p = jnp.exp(s - _finite(m)[..., None])
    acc = jnp.einsum("...mk,...kd->...md", p, v, precision=lax.Precision.HIGHEST)
    return SoftmaxState(m, jnp.sum(p, axis=-1), acc)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """State over the keys of both. At most one of them may have started from a sink."""
    m = jnp.maximum(a.m, b.m)
    wa, wb = jnp.exp(a.m - _finite(m)), jnp.exp(b.m - _finite(m))
    return SoftmaxState(m, a.l * wa + b.l * wb, a.acc * wa[..., None] + b.acc * wb[..., None])


def finish(state: SoftmaxState) -> tuple[jax.Array, jax.Array]:
    """(out float32[..., rows, dim], lse float32[..., rows]): 0 and -inf for a row that saw nothing."""
    empty = state.m == -jnp.inf
    total = jnp.where(empty, 1.0, state.l)
    return state.acc / total[..., None], jnp.where(empty, -jnp.inf, state.m + jnp.log(total))

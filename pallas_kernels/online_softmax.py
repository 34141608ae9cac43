"""Softmax over keys that come in parts: state, one more part, result.

Flow:    empty -> [attend] or [update] per KV tile, [merge_rows] or [merged] parts -> [finish] -> out, lse
Source:  online softmax of FlashAttention (arXiv 2205.14135); sinks as GPT-OSS: one more logit without a value

All arrays are float32; leading axes are free. Whether a row has seen a key is read off its weight, not off `m`: a
maximum may skip NaN, a sum does not, so a NaN among what a row sees always comes out as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class SoftmaxState(NamedTuple):
    """Softmax over the keys seen so far: `out = total / weight`, `lse = m + log(weight)`."""

    m: jax.Array  # [..., rows] largest logit, -inf before the first
    weight: jax.Array  # [..., rows] sum of exp(logit - m)
    total: jax.Array  # [..., rows, dim] sum of exp(logit - m) * value


def capped_sinks(sinks: jax.Array) -> jax.Array:
    """float32 sinks, infinite ones as the largest number: their rows give 0 and that LSE."""
    return jnp.minimum(sinks.astype(jnp.float32), jnp.finfo(jnp.float32).max)


def finite(m: jax.Array) -> jax.Array:
    """`m`, or 0 where it is -inf: `exp(x - m)` then is 0 and not NaN for a row that has seen nothing."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def empty(rows: tuple[int, ...], dim: int) -> SoftmaxState:
    """State of rows that have seen no key."""
    m = jnp.full(rows, -jnp.inf, jnp.float32)
    return SoftmaxState(m, jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, dim), jnp.float32))


def attend(
    state: SoftmaxState,
    q: jax.Array,  # float32[..., rows, head_dim], scaled
    k: jax.Array,  # float32[..., keys, head_dim]
    v: jax.Array,  # float32[..., keys, head_dim_v], finite where no row sees the key
    visible: jax.Array,  # bool[..., rows, keys], broadcast
    soft_cap: float | None,
) -> SoftmaxState:
    """`state` after further keys. A row that sees none of them keeps its state even if a value is NaN."""
    if q.shape[-2] < k.shape[-2]:  # XLA for CPU reads the first operand as it lies and packs the other
        s = jnp.einsum("...kd,...md->...km", k, q, precision=lax.Precision.HIGHEST).swapaxes(-1, -2)
    else:
        s = jnp.einsum("...md,...kd->...mk", q, k, precision=lax.Precision.HIGHEST)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible, s, -jnp.inf)
    return update(state, s, lambda p: jnp.einsum("...mk,...kd->...md", p, v, precision=lax.Precision.HIGHEST))


def update(
    state: SoftmaxState,
    s: jax.Array,  # float32[..., rows, keys] logits, -inf where a row does not see the key
    values_of: Callable[[jax.Array], jax.Array],  # weights float32[..., rows, keys] -> their values [..., rows, dim]
) -> SoftmaxState:
    """`state` after further keys. A row that sees none of them keeps its state even if a value is NaN."""
    m = jnp.maximum(state.m, jnp.max(s, axis=-1))
    p = jnp.exp(s - finite(m)[..., None])
    shrink = jnp.exp(state.m - finite(m))
    weight = jnp.sum(p, axis=-1)
    total = state.total * shrink[..., None] + values_of(p)
    total = jnp.where(weight[..., None] == 0, state.total, total)  # 0 * NaN; a weight of 0 leaves m, so shrink is 1
    return SoftmaxState(m, state.weight * shrink + weight, total)


def merge_rows(
    state: SoftmaxState,  # [N, ...]
    rows: jax.Array,  # int32[n] in any order, one row perhaps several times; beyond N: left out
    parts: SoftmaxState,  # [n, ...] over keys that `state` has not seen
) -> SoftmaxState:
    """`state` with each part merged into its row."""
    m = state.m.at[rows].max(parts.m, mode="drop")
    of_part = m.at[rows].get(mode="fill", fill_value=-jnp.inf)
    kept, added = jnp.exp(state.m - finite(m)), jnp.exp(parts.m - finite(of_part))
    weight = (state.weight * kept).at[rows].add(parts.weight * added, mode="drop")
    total = (state.total * kept[..., None]).at[rows].add(parts.total * added[..., None], mode="drop")
    return SoftmaxState(m, weight, total)


def merged(one: SoftmaxState, other: SoftmaxState) -> SoftmaxState:
    """Row by row the state of the keys of both, which share none."""
    m = jnp.maximum(one.m, other.m)
    first, second = jnp.exp(one.m - finite(m)), jnp.exp(other.m - finite(m))
    total = one.total * first[..., None] + other.total * second[..., None]
    return SoftmaxState(m, one.weight * first + other.weight * second, total)


def finish(state: SoftmaxState, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(out float32[..., rows, dim], lse float32[..., rows]): 0 and -inf for a row that saw no key.

    `sinks` float32[..., rows] are logits without a value, -inf for none. They are merged like a part with `m = sink`
    and weight 1: the larger of both is subtracted first, so that no exponential overflows.
    """
    nothing = state.weight == 0
    m, weight, total = state
    if sinks is not None:
        sinks = capped_sinks(sinks)
        m = jnp.maximum(state.m, sinks)
        shrink = jnp.exp(state.m - finite(m))
        weight = weight * shrink + jnp.exp(sinks - finite(m))
        total = total * shrink[..., None]
    weight = jnp.where(nothing, 1.0, weight)
    return total / weight[..., None], jnp.where(nothing, -jnp.inf, m + jnp.log(weight))

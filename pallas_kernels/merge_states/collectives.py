"""Merges attention over the tokens of ranks that compute at the same time, by collectives over a mesh axis.

Flow:    (out, lse) of a rank, inside `jax.shard_map` -> [merge_ranks] -> attention over the tokens of all ranks
Source:  as `merge_states`

Two all-reduces: a maximum of float32[T, Hq], and a sum of float32[T, Hq] and float32[T, Hq, Dv] together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.online_softmax import SoftmaxState


@by_default_rules
def merge_ranks(
    out: jax.Array,  # [T, Hq, Dv] over the rank's keys, without sinks
    lse: jax.Array,  # float32[T, Hq] natural log, -inf: saw nothing
    axis_name: str,
    *,
    sinks: jax.Array | None = None,  # float32[Hq] natural-log logits without a value, -inf: none
) -> jax.Array:  # [T, Hq, Dv] in the dtype of `out`, the same on every rank
    """`merge_states` of the parts of all ranks of a mesh axis."""
    m = lax.pmax(lse, axis_name)
    share = jnp.exp(lse - online_softmax.finite(m))
    values = jnp.where(share[..., None] == 0, 0.0, out.astype(jnp.float32))  # 0 * NaN is NaN
    weight, total = lax.psum((share, share[..., None] * values), axis_name)
    state = SoftmaxState(m, weight, total)
    merged, _ = online_softmax.finish(state, None if sinks is None else sinks.astype(jnp.float32)[None])
    return merged.astype(out.dtype)

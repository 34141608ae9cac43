"""merge_states in plain jnp: the specification, and the CPU path."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.online_softmax import SoftmaxState, finish


@jax.jit
def merge_states(
    outs: jax.Array,  # [N, T, Hq, Dv]
    lses: jax.Array,  # float32[N, T, Hq]
    sinks: jax.Array | None,  # float32[Hq]
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dv] in the dtype of `outs`, lse float32[T, Hq]) as `pallas_kernels.merge_states.merge_states`."""
    m = jnp.max(lses, axis=0)
    share = jnp.exp(lses - jnp.where(m == -jnp.inf, 0.0, m))
    values = jnp.where(share[..., None] == 0, 0.0, outs.astype(jnp.float32))  # 0 * NaN is NaN
    state = SoftmaxState(m, jnp.sum(share, axis=0), jnp.sum(share[..., None] * values, axis=0))
    out, lse = finish(state, None if sinks is None else sinks.astype(jnp.float32)[None])
    return out.astype(outs.dtype), lse

"""ring_delta_rule in plain jnp, token by token: the specification.

A sequence's state comes out of its page, and its held tokens are added one after another. From there its new tokens go
as `gated_delta_rule` has them; what each adds is put into the ring.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta_rule.reference import by_head, prepared
from pallas_kernels.ring_delta_rule.arguments import DeltaRing, Inputs, Options
from pallas_kernels.ring_step import RingArrays, RingStep
from pallas_kernels.state_step import with_states
from pallas_kernels.varying import vary_like


@functools.partial(jax.jit, static_argnames="options")
def ring_delta_rule(
    inputs: Inputs, states: jax.Array, ring: DeltaRing, arrays: RingArrays, *, options: Options
) -> tuple[jax.Array, jax.Array, DeltaRing]:
    """(out, states, ring) as `RingDeltaOutput`."""
    step = RingStep.of(inputs.v.shape[0], arrays, options.max_new_tokens)
    new = by_head(prepared(inputs, options.rule))

    def sequence(s: jax.Array, carry: tuple[jax.Array, jax.Array, DeltaRing]) -> tuple[jax.Array, jax.Array, DeltaRing]:
        out, states, ring = carry
        state = states[step.read[s]].astype(jnp.float32)

        def held(j: jax.Array, state: jax.Array) -> jax.Array:
            key, delta, decay = (array[step.read[s], j] for array in ring)
            kept = Inputs(key[None], key[None], delta[None], decay[None], jnp.zeros((1, delta.shape[0])))
            kept = by_head(prepared(kept, options.rule))
            return _added(state, kept.k[0], kept.v[0], kept.g[0])

        def one(i: jax.Array, carry: tuple[jax.Array, jax.Array, DeltaRing]) -> tuple[jax.Array, jax.Array, DeltaRing]:
            out, state, ring = carry
            t = step.starts[s] + i
            q, k, v, g, beta = (x[t] for x in new)
            delta = beta[:, None] * (v - jnp.sum(state * (jnp.exp(g) * k)[..., None], axis=1))
            state = _added(state, k, delta, g)
            seen = jnp.sum(state * q[..., None], axis=1)
            entry = DeltaRing(inputs.k[t], delta, inputs.g[t])
            place = (jnp.where(step.ring_page[s] > 0, step.ring_page[s], states.shape[0]), step.first_slot[s] + i)
            written = (x.at[place].set(y.astype(x.dtype), mode="drop") for x, y in zip(ring, entry, strict=True))
            return out.at[t].set(seen), state, DeltaRing(*written)

        state = lax.fori_loop(0, step.held[s], held, state)
        states = with_states(states, step.state_page[s], state)
        out, _, ring = lax.fori_loop(0, step.num_new[s], one, (out, state, ring))
        return out, states, ring

    carry = vary_like((jnp.zeros(inputs.v.shape, jnp.float32), states, ring), *inputs, *step)
    out, states, ring = lax.fori_loop(0, arrays.distribution[2], sequence, carry)
    return out.astype(inputs.v.dtype), states, ring


def _added(state: jax.Array, key: jax.Array, delta: jax.Array, g: jax.Array) -> jax.Array:
    """The state [H, K, V] after a token: decayed by g [H, 1 or K], and key [H, K] times delta [H, V] added."""
    return jnp.exp(g)[..., None] * state + key[..., None] * delta[:, None]

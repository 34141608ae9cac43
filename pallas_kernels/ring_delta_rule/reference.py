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
from pallas_kernels.ring_delta_rule.arguments import Inputs, Options, Pages
from pallas_kernels.ring_step import RingArrays, RingStep
from pallas_kernels.slab_pages import replaced
from pallas_kernels.state_step import with_states
from pallas_kernels.varying import vary_like


@functools.partial(jax.jit, static_argnames="options")
def ring_delta_rule(inputs: Inputs, pages: Pages, arrays: RingArrays, *, options: Options) -> tuple[jax.Array, Pages]:
    """(out, pages) as `RingDeltaOutput`."""
    step = RingStep.of(inputs.v.shape[0], arrays, options.max_new_tokens)
    new = by_head(prepared(inputs, options.rule))

    def sequence(s: jax.Array, carry: tuple[jax.Array, Pages]) -> tuple[jax.Array, Pages]:
        out, pages = carry

        def held(j: jax.Array, state: jax.Array) -> jax.Array:
            key, delta, decay = (pages[i][step.read[s], j] for i in (1, 2, 3))
            kept = Inputs(key[None], key[None], delta[None], decay[None], jnp.zeros((1, delta.shape[0])))
            kept = by_head(prepared(kept, options.rule))
            return _added(state, kept.k[0], kept.v[0], kept.g[0])

        def one(n: jax.Array, carry: tuple[jax.Array, jax.Array, Pages]) -> tuple[jax.Array, jax.Array, Pages]:
            out, state, pages = carry
            t = step.starts[s] + n
            q, k, v, g, beta = (x[t] for x in new)
            delta = beta[:, None] * (v - jnp.sum(state * (jnp.exp(g) * k)[..., None], axis=1))
            state = _added(state, k, delta, g)
            page = jnp.where(step.ring_page[s] > 0, step.ring_page[s], pages[0].shape[0])
            for i, x in enumerate((inputs.k[t], delta, inputs.g[t]), start=1):
                entry = pages[i].at[page, step.first_slot[s] + n].set(x.astype(pages[i].dtype), mode="drop")
                pages = replaced(pages, i, entry)
            return out.at[t].set(jnp.sum(state * q[..., None], axis=1)), state, pages

        state = lax.fori_loop(0, step.held[s], held, pages[0][step.read[s]].astype(jnp.float32))
        pages = replaced(pages, 0, with_states(pages[0], step.state_page[s], state))
        out, _, pages = lax.fori_loop(0, step.num_new[s], one, (out, state, pages))
        return out, pages

    carry = vary_like((jnp.zeros(inputs.v.shape, jnp.float32), pages), *inputs, *step)
    out, pages = lax.fori_loop(0, arrays.distribution[2], sequence, carry)
    return out.astype(inputs.v.dtype), pages


def _added(state: jax.Array, key: jax.Array, delta: jax.Array, g: jax.Array) -> jax.Array:
    """The state [H, K, V] after a token: decayed by g [H, 1 or K], and key [H, K] times delta [H, V] added."""
    return jnp.exp(g)[..., None] * state + key[..., None] * delta[:, None]

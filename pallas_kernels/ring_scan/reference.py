"""ring_scan in plain jnp, token by token: the specification.

A sequence's state comes out of its page, and its held tokens are added one after another. From there its new tokens go
as `selective_scan` has them. What each adds is put into the ring.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ring_scan.arguments import Options, Scan
from pallas_kernels.ring_scan.slots import from_slots, to_slots
from pallas_kernels.ring_step import RingArrays, RingStep, with_entries
from pallas_kernels.slab_pages import replaced
from pallas_kernels.ssm_update.reference import time_steps
from pallas_kernels.state_step import with_states
from pallas_kernels.varying import vary_like

# states, xs, dts, bs
Pages = tuple[jax.Array, ...]


class Tokens(NamedTuple):
    """What tokens add to a state."""

    x: jax.Array  # [..., H, P]
    dt: jax.Array  # float32[..., H] time steps
    b: jax.Array  # [..., G, N]

    @classmethod
    def of(cls, inputs: Scan, options: Options) -> Tokens:
        """The new ones."""
        return cls(inputs.x, time_steps(inputs.dt, inputs.dt_bias, options.dt_limit), inputs.b)

    def written(self, pages: Pages, step: RingStep) -> Pages:
        """`pages` with the entries of these, the new tokens, in their rings."""
        for i, numbers in enumerate(self, start=1):
            pages = replaced(pages, i, with_entries(pages[i], step, to_slots(numbers, pages[i])))
        return pages


@functools.partial(jax.jit, static_argnames="options")
def ring_scan(inputs: Scan, pages: Pages, arrays: RingArrays, *, options: Options) -> tuple[jax.Array, Pages]:
    """(out, pages) as `RingScanOutput`."""
    step = RingStep.of(inputs.x.shape[0], arrays, options.max_new_tokens)
    new = Tokens.of(inputs, options)
    shapes = [y.shape[1:] for y in new]

    def sequence(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        ring = [replaced(pages, 0, states)[i] for i in (1, 2, 3)]

        def held(j: jax.Array, state: jax.Array) -> jax.Array:
            entry = (from_slots(y[step.read[s], j], 0, shape) for y, shape in zip(ring, shapes, strict=True))
            return _added(state, inputs.a, Tokens(*entry))

        def one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, state = carry
            t = step.starts[s] + i
            state = _added(state, inputs.a, Tokens(*(y[t] for y in new)))
            seen = jnp.sum(state * _by_head(inputs.c[t], state)[:, None], axis=-1)
            return out.at[t].set(seen + with_skip(inputs, t)), state

        state = lax.fori_loop(0, step.held[s], held, states[step.read[s]].astype(jnp.float32))
        out, _ = lax.fori_loop(0, step.num_new[s], one, (out, state))
        return out, with_states(states, step.state_page[s], state)

    carry = vary_like((jnp.zeros(inputs.x.shape, jnp.float32), pages[0]), *inputs, *pages, *step)
    out, states = lax.fori_loop(0, arrays.distribution[2], sequence, carry)
    return out.astype(inputs.x.dtype), new.written(after_reading(replaced(pages, 0, states), out), step)


def after_reading(pages: Pages, out: jax.Array) -> Pages:
    """`pages`, which nobody reads once there is `out`: what is written to them then needs no copy."""
    return lax.optimization_barrier((pages, out))[0]


def with_skip(inputs: Scan, token: jax.Array) -> jax.Array:
    """`d * x` float32[..., H, P] of tokens int32[...], 0 without d."""
    x = inputs.x[token].astype(jnp.float32)
    return jnp.zeros_like(x) if inputs.d is None else inputs.d.astype(jnp.float32)[:, None] * x


def _added(state: jax.Array, a: jax.Array, token: Tokens) -> jax.Array:
    """The state float32[H, P, N] after a token."""
    x, dt, b = token
    decay = jnp.exp(dt * a.astype(jnp.float32))
    inflow = (dt[:, None] * x.astype(jnp.float32))[..., None] * _by_head(b, state)[:, None]
    return decay[:, None, None] * state + inflow


def _by_head(x: jax.Array, state: jax.Array) -> jax.Array:
    """float32[H, N] of [G, N]."""
    return jnp.repeat(x.astype(jnp.float32), state.shape[0] // x.shape[0], axis=0)

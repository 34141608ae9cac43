"""gated_delta_rule in plain XLA, vectorised over sequences of one token: for GPUs whose kernels cannot take a call.

Flow:    api -> [gated_delta_rule] -> sequences of one token, a trip at a time; others by the reference -> (out, states)

Sequences of several tokens go chunk by chunk, as the reference takes them: products of matrices, one chunk after the
other. A trip's states are at most `_TRIP_BYTES`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import XlaPath
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.reference import CHUNK_TOKENS, TokenStates, by_head, prepared, scan
from pallas_kernels.layouts import cdiv
from pallas_kernels.state_step import StateStep, StepArrays, with_states
from pallas_kernels.varying import vary_like

_TRIP_BYTES = 32 << 20


def path_over(states: jax.Array, num_seqs: int) -> XlaPath:
    """What a call costs: states are read thrice, written, and read and written in their pages."""
    state_bytes = math.prod(states.shape[1:]) * states.dtype.itemsize
    return XlaPath(6, num_seqs * state_bytes, "the states of its sequences")


@functools.partial(jax.jit, static_argnames=("options", "trip_bytes"))
def gated_delta_rule(
    inputs: Inputs, states: jax.Array, arrays: StepArrays, *, options: Options, trip_bytes: int = _TRIP_BYTES
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `DeltaOutput`."""
    num_tokens = inputs.v.shape[0]
    step = StateStep.of(num_tokens, arrays)
    with jax.named_scope("single"):
        out, states = _single_tokens(inputs, states, step, options, trip_bytes)
    if num_tokens > 1:
        tokens = TokenStates.of(step)
        others = tokens._replace(place=jnp.where((step.q_lens > 1)[step.seq], tokens.place, -1))
        with jax.named_scope("chunks"):
            scanned, states = scan(inputs, states, others, options, CHUNK_TOKENS)
        out = jnp.where((others.place >= 0)[:, None, None], scanned, out)
    return out.astype(inputs.v.dtype), states


def num_trips(states_shape: tuple[int, ...], num_seqs: int, num_single: int) -> dict[str, int]:
    """Runs of the loop over sequences of one token."""
    return {"single": cdiv(num_single, _sequences_of_trip(states_shape, num_seqs, _TRIP_BYTES)), "chunks": 0}


def _sequences_of_trip(states_shape: tuple[int, ...], num_seqs: int, trip_bytes: int) -> int:
    """Sequences of one token that are advanced at a time."""
    most = max(1, trip_bytes // (4 * math.prod(states_shape[1:])))
    return cdiv(num_seqs, cdiv(num_seqs, most))


def _single_tokens(
    inputs: Inputs, states: jax.Array, step: StateStep, options: Options, trip_bytes: int
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32[T, H, V] of sequences of one token, 0 elsewhere; states)."""
    num_tokens, num_seqs = inputs.v.shape[0], step.q_lens.shape[0]
    size = _sequences_of_trip(states.shape, num_seqs, trip_bytes)
    count = jnp.sum(step.q_lens == 1)
    (order,) = jnp.nonzero(step.q_lens == 1, size=cdiv(num_seqs, size) * size, fill_value=num_seqs)

    def trip(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        seq = lax.dynamic_slice_in_dim(order, i * size, size)
        is_real = seq < num_seqs
        seq = jnp.minimum(seq, num_seqs - 1)
        token = jnp.where(is_real, step.starts[seq], num_tokens)
        own = Inputs(*(x.at[token].get(mode="fill", fill_value=0) for x in inputs))
        q, k, v, g, beta = by_head(prepared(own, options))
        before = states[jnp.where(is_real, step.read[seq], 0)].astype(jnp.float32) * jnp.exp(g)[..., None]
        delta = beta[..., None] * (v - jnp.sum(before * k[..., None], axis=2))
        after = lax.optimization_barrier(before + k[..., None] * delta[:, :, None])
        out = out.at[token].set(jnp.sum(after * q[..., None], axis=2), mode="drop")
        return out, with_states(states, jnp.where(is_real, step.last_write[seq], 0), after)

    carry = vary_like((jnp.zeros(inputs.v.shape, jnp.float32), states), *inputs, *step)
    return lax.fori_loop(0, -(-count // size), trip, carry)

"""causal_conv1d and selective_scan in plain jnp: the specification, and the CPU path.

The convolution takes each tap of all tokens at once. The scan goes over the new tokens of all sequences in chunks of a
few, whatever sequences they belong to. Inside a chunk it is a segmented scan, whose segments begin where sequences do.
From chunk to chunk it carries the state of the last token. Its cost follows the real tokens; in a chunk of decode
tokens, each a sequence of its own, there is nothing to scan. What is not finite stays within its sequence.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ssm_update.arguments import Convolution, Scan
from pallas_kernels.state_step import StateStep, StepArrays, with_states
from pallas_kernels.varying import vary_like

_CHUNK_TOKENS = 64
_CHUNK_NUMBERS = 1 << 22  # of the states of all tokens of a chunk: 16 MiB


class ConvInputs(NamedTuple):
    """Inputs of a convolution by sequence and place: those of the step, and before them those in the states."""

    new: jax.Array  # [T, C]
    old: jax.Array  # [S, W - 1, C]
    step: StateStep

    @classmethod
    def of(cls, x: jax.Array, states: jax.Array, step: StateStep) -> ConvInputs:
        """The inputs of the new tokens `x` [T, C], and of the states that the sequences start from.

        Behind a barrier: XLA for CPU else reads the pages anew for every tap of every token.
        """
        return cls(x, lax.optimization_barrier(states[step.read].swapaxes(1, 2)), step)

    def at(self, seq: jax.Array, place: jax.Array) -> jax.Array:
        """float32[..., C] at int32[...] places of sequences; those from -(W - 1) to -1 are in the states."""
        from_new = self.new[jnp.clip(self.step.starts[seq] + place, 0, self.new.shape[0] - 1)]
        from_old = self.old[seq, jnp.minimum(place, -1) + self.old.shape[1]]
        return jnp.where((place >= 0)[..., None], from_new.astype(jnp.float32), from_old.astype(jnp.float32))

    @property
    def last(self) -> jax.Array:
        """float32[S, L, W - 1, C]: the last inputs of every sequence, up to each place where it leaves a state."""
        ends = self.step.ends
        places = ends[..., None] + jnp.arange(-self.old.shape[1], 0)
        return self.at(jnp.arange(ends.shape[0])[:, None, None], places)

    def written(self, states: jax.Array) -> jax.Array:
        """`states` with the last inputs in the pages that the sequences write."""
        return with_states(states, self.step.pages, self.last.swapaxes(2, 3))


@functools.partial(jax.jit, static_argnames="activation")
def causal_conv1d(
    arguments: Convolution, states: jax.Array, arrays: StepArrays, *, activation: str | None
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, weight, bias = arguments
    num_taps = weight.shape[1]
    step = StateStep.of(x.shape[0], arrays)
    inputs = ConvInputs.of(x, states, step)
    out = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for tap in range(num_taps):
        place = jnp.maximum(step.place, 0) + tap - (num_taps - 1)
        out = out + weight[:, tap].astype(jnp.float32) * inputs.at(step.seq, place)
    out = jax.nn.silu(out) if activation == "silu" else out
    return jnp.where((step.place >= 0)[:, None], out, 0.0).astype(x.dtype), inputs.written(states)


@functools.partial(jax.jit, static_argnames="dt_limit")
def selective_scan(
    arguments: Scan, states: jax.Array, arrays: StepArrays, *, dt_limit: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, dt, a, b, c, d, dt_bias = arguments
    step = StateStep.of(x.shape[0], arrays)
    tokens = ScanTokens(x, time_steps(dt, dt_bias, dt_limit), b, c, step.place, step.reads, step.writes)
    out, states = scan(tokens, states, a, jnp.sum(step.q_lens))
    return add_skip(out.reshape(x.shape), x, d, step), states


def time_steps(dt: jax.Array, dt_bias: jax.Array | None, dt_limit: tuple[float, float]) -> jax.Array:
    """float32[T, H] steps of `dt` [T, H] before softplus."""
    dt = dt.astype(jnp.float32) + (0.0 if dt_bias is None else dt_bias.astype(jnp.float32))
    return jnp.clip(jax.nn.softplus(dt), *dt_limit)


def add_skip(out: jax.Array, x: jax.Array, d: jax.Array | None, step: StateStep) -> jax.Array:
    """`out + d * x`, 0 for padding, in the dtype of `x` [T, H, ...], from float32 `out` of that shape; d: [H]."""

    def per(axis: int, values: jax.Array) -> jax.Array:
        return jnp.expand_dims(values, [n for n in range(x.ndim) if n != axis])

    if d is not None:
        out = out + per(1, d.astype(jnp.float32)) * x.astype(jnp.float32)
    return jnp.where(per(0, step.place >= 0), out, 0.0).astype(x.dtype)


def _per_head(x: jax.Array, num_heads: int) -> jax.Array:
    """float32[T, H or 1, N] of [T, N], the same for all heads, or of [T, G, N]."""
    x = x.astype(jnp.float32)
    return x[:, None] if x.ndim == 2 else jnp.repeat(x, num_heads // x.shape[1], axis=1)


class ScanTokens(NamedTuple):
    """Inputs of tokens, in order, and the pages of their states."""

    x: jax.Array  # [T, H] or [T, H, P]
    dt: jax.Array  # float32[T, H] time steps
    b: jax.Array  # [T, N] or [T, G, N]
    c: jax.Array
    place: jax.Array  # int32[T] among the new tokens of its sequence
    read: jax.Array  # int32[T] page of the sequence's initial state
    write: jax.Array  # int32[T] page for the state after it, 0 where none is


def scan(
    tokens: ScanTokens,
    states: jax.Array,  # [pages, H, N] or [pages, H, P, N]
    a: jax.Array,  # [H, N] or [H]
    count: jax.Array,  # int32[] tokens to compute
) -> tuple[jax.Array, jax.Array]:
    """(c . state float32[T, H, P] of the first `count` tokens; the states with those after tokens written).

    Those after them are of no sequence: they begin none and write nothing.
    """
    num_tokens, num_heads = tokens.dt.shape
    x = tokens.x.astype(jnp.float32).reshape(num_tokens, num_heads, -1)  # P = 1 in Mamba 1
    b, c = (_per_head(y, num_heads) for y in (tokens.b, tokens.c))
    a = a.astype(jnp.float32).reshape(num_heads, 1, -1)
    return _scan(tokens._replace(x=x, b=b, c=c), states, a, count)


def scan_drafts(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, states: jax.Array, step: StateStep
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(bool[T] tokens of sequences that keep states for drafts, their outputs float32 as x, states)."""
    num_tokens = x.shape[0]
    of_drafts = (step.place >= 0) & (step.num_kept > 1)[step.seq]
    count = jnp.sum(of_drafts)
    (order,) = jnp.nonzero(of_drafts, size=num_tokens, fill_value=0)
    is_one = jnp.arange(num_tokens) < count
    tokens = ScanTokens(*(y[order] for y in (x, dt, b, c, step.place, step.reads, step.writes)))
    tokens = tokens._replace(place=jnp.where(is_one, tokens.place, -1), write=jnp.where(is_one, tokens.write, 0))
    out, states = scan(tokens, states, a, count)
    target = jnp.where(is_one, order, num_tokens)
    return of_drafts, jnp.zeros(x.shape, jnp.float32).at[target].set(out.reshape(x.shape), mode="drop"), states


def _scan(tokens: ScanTokens, states: jax.Array, a: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `scan`, of x [T, H, P], b and c [T, H or 1, N] and a [H, 1, N or 1] in float32."""
    num_tokens, *shape = *tokens.x.shape, states.shape[-1]  # [H, P, N] of a state
    size = min(num_tokens, _CHUNK_TOKENS, max(1, _CHUNK_NUMBERS // math.prod(states.shape[1:])))
    padded = [jnp.pad(y, [(0, -num_tokens % size), *[(0, 0)] * (y.ndim - 1)]) for y in tokens]

    def chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        states, state, out = carry
        x, dt, b, c, place, read, write = (lax.dynamic_slice_in_dim(y, i * size, size) for y in padded)
        first = (place == 0)[:, None, None, None]
        decay = jnp.exp(dt[..., None, None] * a)  # [size, H, 1, N or 1]
        initial = states[read].reshape(size, *shape).astype(jnp.float32)
        initial = initial.at[0].set(jnp.where(first[0], initial[0], state))  # others continue from the chunk before
        begins = first.at[0].set(True)
        inflow = dt[..., None, None] * x[..., None] * b[:, :, None]
        inflow = inflow + jnp.where(begins, decay * initial, 0.0)
        after = lax.cond(begins.all(), lambda: inflow, lambda: _segmented_scan(begins, decay, inflow))
        states = with_states(states, write, after.reshape(size, *states.shape[1:]))
        c = jnp.broadcast_to(c, (size, *after.shape[1::2]))
        seen = jnp.einsum("thpn,thn->thp", after, c, precision=lax.Precision.HIGHEST)
        return states, after[-1], lax.dynamic_update_slice_in_dim(out, seen, i * size, axis=0)

    state = jnp.zeros(shape, jnp.float32)
    out = jnp.zeros(padded[0].shape, jnp.float32)
    carry = vary_like((states, state, out), *padded, a, count)
    states, _, out = lax.fori_loop(0, -(-count // size), chunk, carry)
    return out[:num_tokens], states


def _segmented_scan(begins: jax.Array, decay: jax.Array, inflow: jax.Array) -> jax.Array:
    """`state[t] = decay[t] * state[t - 1] + inflow[t]` along axis 0, and `inflow[t]` where a segment begins."""

    def combine(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begins, decay, inflow = right
        carried = jnp.where(begins, inflow, decay * left[2] + inflow)
        return left[0] | begins, left[1] * decay, carried

    return lax.associative_scan(combine, (begins, decay, inflow))[2]

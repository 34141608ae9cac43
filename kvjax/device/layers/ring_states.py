"""Recurrent layers whose pages are a state and a ring: which tokens a step goes on from, and what it appends.

Flow:    a layer's inputs + RecurrentStep -> [convolve_in_ring, update_in_ring] -> outputs, the layer's arrays
Source:  kvjax.core.kinds.ring_state says what a page holds; pallas_kernels.ring_delta_rule, pallas_kernels.ring_scan

A *short* sequence has at most 1 + drafts new tokens and leaves no state on its way: an op over rings takes it. All
others go by the op without, from the state after the tokens of their ring; the ring of their pages is empty afterwards.

Axis names: S sequences, T tokens, C channels, L inputs that the pages of a convolution hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from kvjax.device.layers.state_update import RecurrentStep, StepOverRings
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.ssm_update import causal_conv1d
from pallas_kernels.state_step import StateStep, StepArrays, with_states


class Output(Protocol):
    """What an op over states gives."""

    @property
    def out(self) -> jax.Array:
        """[T, heads, ...]."""

    @property
    def states(self) -> jax.Array:
        """Those of the step written."""


class OutputOverRing(Output, Protocol):
    """What an op over rings gives."""

    @property
    def ring(self) -> tuple[jax.Array, ...]:
        """Its arrays."""


class RingSizes(NamedTuple):
    """Of a layer's pages, and what is known of a step."""

    ring_tokens: int
    most_new_tokens: int  # of a short sequence
    all_short: bool  # whether the step has no other sequences


class RingStep(NamedTuple):
    """The sequences of a step, and the rings that they go on from and append to. Page 0 is none."""

    places: StateStep  # of sequences and tokens
    before: jax.Array  # int32[S] computed tokens
    num_held: jax.Array  # int32[S] tokens in the ring that is read
    is_short: jax.Array  # bool[S]
    writes_state: jax.Array  # bool[S] whether the state after the held tokens is written, and the ring begins again

    @classmethod
    def of(cls, told: StepOverRings, num_tokens: int, base: jax.Array, sizes: RingSizes) -> RingStep:
        """Those of a step over pages whose states are of int32[pages, 1, heads] `base` tokens."""
        places, before = _places_and_computed(told, num_tokens)
        read, write, q_lens = places.read, places.last_write, places.q_lens
        num_held = jnp.where(read > 0, before - base[read, 0, 0], 0)
        is_short = q_lens <= sizes.most_new_tokens
        if places.checkpoints is not None:
            is_short &= ~jnp.any(places.checkpoints.pages > 0, axis=1)
        is_full = (read != write) | (num_held + q_lens > sizes.ring_tokens)
        writes_state = (q_lens > 0) & jnp.where(is_short, is_full, num_held > 0)
        return cls(places, before, num_held, is_short, writes_state)

    @property
    def is_long(self) -> jax.Array:  # bool[S]
        """Whether the op without rings takes a sequence."""
        return (self.places.q_lens > 0) & ~self.is_short

    def op_arguments(self, step: RecurrentStep, most_new_tokens: int) -> dict[str, Any]:
        """Those that ops over rings have in common."""
        read, write = self.places.read, self.places.last_write
        return {
            "query_start_loc": step.query_start_loc,
            "distribution": step.distribution,
            "state_read": jnp.where(self.is_short | self.writes_state, read, write),
            "state_write": write,
            "num_held": self.num_held,
            "writes_state": self.writes_state,
            "max_new_tokens": most_new_tokens,
        }

    def long_step(self, step: RecurrentStep) -> RecurrentStep:
        """The step of the op without rings: short sequences read and write nothing; none at all if all are short."""
        is_long, write = self.is_long, self.places.last_write
        read = jnp.where(self.writes_state, write, self.places.read)
        return step._replace(
            distribution=jnp.where(jnp.any(is_long), step.distribution * jnp.array([0, 0, 1], jnp.int32), 0),
            state_read=jnp.where(is_long, read, 0),
            state_write=jnp.where(is_long, write, 0),
            has_initial_state=is_long & (self.before > 0),
        )

    def base_after(self, base: jax.Array) -> jax.Array:  # int32[pages, 1, heads]
        """How many tokens the states are of after the step."""
        after = jnp.where(self.is_short, self.before, self.before + self.places.q_lens)
        pages = jnp.where(self.writes_state | ~self.is_short, self.places.last_write, 0)
        base = with_states(base, pages, _of_pages(after, base))
        if self.places.checkpoints is None:
            return base
        ends, pages = self.places.checkpoints
        return with_states(base, pages, _of_pages(self.before[:, None] + ends, base))


RingOp: TypeAlias = Callable[[jax.Array, Column, dict[str, Any]], OutputOverRing]  # state, ring, `op_arguments`
PlainOp: TypeAlias = Callable[[jax.Array, RecurrentStep], Output]


def update_in_ring(
    arrays: Column,  # state, the ring's, base
    told: StepOverRings,
    num_tokens: int,
    sizes: RingSizes,
    ring_op: RingOp,
    plain_op: PlainOp,
) -> tuple[jax.Array, Column]:
    """Outputs [T, heads, ...] of all sequences, and the arrays after the step."""
    (state, *ring, base), step = arrays, told.step
    rings = RingStep.of(told, num_tokens, base, sizes)
    short = ring_op(state, tuple(ring), rings.op_arguments(step, sizes.most_new_tokens))
    after = (*short.ring, rings.base_after(base))
    if sizes.all_short and step.checkpoint_ends is None:
        return short.out, (short.states, *after)
    others = plain_op(short.states, rings.long_step(step))
    is_long = rings.is_long[rings.places.seq] & (rings.places.place >= 0)
    out = jnp.where(is_long.reshape(-1, *[1] * (short.out.ndim - 1)), others.out, short.out)
    return out, (others.states, *after)


def convolve_in_ring(
    windows: jax.Array,  # [pages, C, L] the input of token t at place (t - 1) % L
    told: StepOverRings,
    x: jax.Array,  # [T, C]
    weight: jax.Array,  # [C, W]
    bias: jax.Array | None,  # [C]
    *,
    activation: str | None,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d`, and the windows after the step: every page that is written gets its last L inputs."""
    places, before = _places_and_computed(told, x.shape[0])
    num_sequences, (num_channels, length), num_taps = before.shape[0], windows.shape[1:], weight.shape[1]
    held = windows[places.read]  # [S, C, L]
    tokens = before[:, None] + jnp.arange(2 - num_taps, 1)  # int32[S, W - 1] numbers of the last ones, from 1 on
    first = jnp.take_along_axis(held, ((tokens - 1) % length)[:, None], axis=2)
    first = jnp.where((tokens > 0)[:, None], first, 0)
    states = jnp.concatenate([jnp.zeros((1, num_channels, num_taps - 1), windows.dtype), first])
    plain = told.step._replace(
        state_read=jnp.arange(1, num_sequences + 1, dtype=jnp.int32),
        state_write=jnp.zeros(num_sequences, jnp.int32),
        has_initial_state=before > 0,
        checkpoint_ends=None,
        checkpoint_pages=None,
    )
    out = causal_conv1d(x, states, weight, *plain, bias=bias, activation=activation, backend=backend).out

    def windows_of(ends: jax.Array) -> jax.Array:  # int32[S, n] new tokens -> [S, n, C, L]
        last = (before[:, None] + ends)[..., None]
        tokens = last - (last - 1 - jnp.arange(length)) % length  # int32[S, n, L]
        at = places.starts[:, None, None] + tokens - before[:, None, None] - 1
        new = jnp.moveaxis(x[jnp.clip(at, 0, x.shape[0] - 1)], 3, 2)
        is_new = (tokens > before[:, None, None])[:, :, None]
        return jnp.where(is_new, new.astype(windows.dtype), held[:, None])

    windows = with_states(windows, places.write, windows_of(places.q_lens[:, None]))
    if places.checkpoints is not None:
        windows = with_states(windows, places.checkpoints.pages, windows_of(places.checkpoints.ends))
    return out, windows


def _places_and_computed(told: StepOverRings, num_tokens: int) -> tuple[StateStep, jax.Array]:
    """The places of a step's sequences and tokens, and int32[S] computed tokens, 0 of those that begin."""
    places = StateStep.of(num_tokens, StepArrays(*told.step).by_column())
    return places, jnp.where(told.step.has_initial_state, told.seq_lens - places.q_lens, 0)


def _of_pages(numbers: jax.Array, base: jax.Array) -> jax.Array:
    """int32[...] numbers of tokens as pages of `base`."""
    return jnp.broadcast_to(numbers[..., None, None], (*numbers.shape, *base.shape[1:]))


__all__ = ["RingSizes", "RingStep", "convolve_in_ring", "update_in_ring"]

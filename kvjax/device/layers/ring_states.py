"""Recurrent layers whose pages are a state and a ring: which tokens a step goes on from, and what it appends.

Flow:    a layer's inputs + RecurrentStep -> [convolve_in_ring, update_in_ring] -> outputs, the layer's arrays
Source:  kvjax.core.kinds.ring_state says what a page holds; pallas_kernels.ring_delta_rule, pallas_kernels.ring_scan

A *short* sequence has at most 1 + drafts new tokens and leaves no state on its way: an op over rings takes it. All
others go by the op without, from the state after the tokens of their ring; the ring of their pages is empty afterwards.

Axis names: S sequences, T tokens, C channels, L inputs that the pages of a convolution hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from kvjax.device.layers.state_update import RecurrentStep, StepOverRings
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.ssm_update import causal_conv1d


class RingSizes(NamedTuple):
    """Of a layer's pages, and what is known of a step."""

    ring_tokens: int
    most_new_tokens: int  # of a short sequence
    all_short: bool  # whether the step has no other sequences


class RingStep(NamedTuple):
    """The sequences of a step, and the rings that they go on from and append to. Page 0 is none."""

    read: jax.Array  # int32[S] page, 0 where the sequence begins
    write: jax.Array  # int32[S] page, 0 where the sequence has no new tokens
    before: jax.Array  # int32[S] computed tokens
    q_lens: jax.Array  # int32[S] new tokens
    num_held: jax.Array  # int32[S] tokens in the ring that is read
    is_short: jax.Array  # bool[S]
    writes_state: jax.Array  # bool[S] whether the state after the held tokens is written, and the ring begins again

    @classmethod
    def of(cls, told: StepOverRings, base: jax.Array, sizes: RingSizes) -> RingStep:
        """Those of a step over pages whose states are of int32[pages, 1, heads] `base` tokens."""
        read, write, before, q_lens = _pages_and_tokens(told)
        num_held = jnp.where(read > 0, before - base[read, 0, 0], 0)
        is_short = q_lens <= sizes.most_new_tokens
        if told.step.checkpoint_ends is not None:
            is_short &= ~jnp.any(told.step.checkpoint_ends > 0, axis=1)
        is_full = (read != write) | (num_held + q_lens > sizes.ring_tokens)
        writes_state = (q_lens > 0) & jnp.where(is_short, is_full, num_held > 0)
        return cls(read, write, before, q_lens, num_held, is_short, writes_state)

    def op_arguments(self, step: RecurrentStep, most_new_tokens: int) -> dict[str, Any]:
        """Those that ops over rings have in common."""
        return {
            "query_start_loc": step.query_start_loc,
            "distribution": step.distribution,
            "state_read": jnp.where(self.is_short | self.writes_state, self.read, self.write),
            "state_write": self.write,
            "num_held": self.num_held,
            "writes_state": self.writes_state,
            "max_new_tokens": most_new_tokens,
        }

    def long_step(self, step: RecurrentStep) -> RecurrentStep:
        """The step of the op without rings: short sequences read and write nothing; none at all if all are short."""
        is_long = (self.q_lens > 0) & ~self.is_short
        has_long = jnp.any(is_long)
        read = jnp.where(self.writes_state, self.write, self.read)
        return step._replace(
            distribution=jnp.where(has_long, step.distribution * jnp.array([0, 0, 1], jnp.int32), 0),
            state_read=jnp.where(is_long, read, 0),
            state_write=jnp.where(is_long, self.write, 0),
            has_initial_state=is_long & (self.before > 0),
        )

    def base_after(self, base: jax.Array, step: RecurrentStep) -> jax.Array:  # int32[pages, 1, heads]
        """How many tokens the states are of after the step."""
        writes = self.writes_state | ~self.is_short
        after = jnp.where(self.is_short, self.before, self.before + self.q_lens)
        base = _set_rows(base, jnp.where(writes, self.write, 0), after[:, None, None])
        if step.checkpoint_ends is None or step.checkpoint_pages is None:
            return base
        ends = step.checkpoint_ends
        pages = jnp.where((ends > 0) & (self.q_lens > 0)[:, None], step.checkpoint_pages, 0)
        return _set_rows(base, pages.reshape(-1), (self.before[:, None] + ends).reshape(-1, 1, 1))


# (state, ring, arguments of the op by name) -> (outputs, state, ring)
RingOp: TypeAlias = Callable[[jax.Array, Column, dict[str, Any]], tuple[jax.Array, jax.Array, Column]]
PlainOp: TypeAlias = Callable[[jax.Array, RecurrentStep], tuple[jax.Array, jax.Array]]


def update_in_ring(
    arrays: Column,  # state, the ring's, base
    told: StepOverRings,
    sizes: RingSizes,
    ring_op: RingOp,
    plain_op: PlainOp,
) -> tuple[jax.Array, Column]:
    """Outputs [T, heads, ...] of all sequences, and the arrays after the step."""
    (state, *ring, base), step = arrays, told.step
    rings = RingStep.of(told, base, sizes)
    out, state, after = ring_op(state, tuple(ring), rings.op_arguments(step, sizes.most_new_tokens))
    if sizes.all_short and step.checkpoint_ends is None:
        return out, (state, *after, rings.base_after(base, step))
    long_out, state = plain_op(state, rings.long_step(step))
    token = jnp.arange(out.shape[0])[:, None]
    starts, ends = step.query_start_loc[:-1], step.query_start_loc[:-1] + rings.q_lens
    is_long = jnp.any((token >= starts) & (token < ends) & ~rings.is_short, axis=1)
    out = jnp.where(is_long.reshape(-1, *[1] * (out.ndim - 1)), long_out, out)
    return out, (state, *after, rings.base_after(base, step))


def convolve_in_ring(
    windows: jax.Array,  # [pages, C, L] the input of token t at place (t - 1) % L
    told: StepOverRings,
    x: jax.Array,  # [T, C]
    weight: jax.Array,  # [C, W]
    bias: jax.Array | None,  # [C]
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d`, and the windows after the step: every page that is written gets its last L inputs."""
    step = told.step
    read, write, before, q_lens = _pages_and_tokens(told)
    num_sequences, (num_channels, length), num_taps = read.shape[0], windows.shape[1:], weight.shape[1]
    held = windows[read]  # [S, C, L]
    tokens = before[:, None] + jnp.arange(2 - num_taps, 1)  # int32[S, W - 1] numbers of the last ones, from 1 on
    first = jnp.take_along_axis(held, ((tokens - 1) % length)[:, None], axis=2)
    first = jnp.where((tokens > 0)[:, None], first, 0)
    states = jnp.concatenate([jnp.zeros((1, num_channels, num_taps - 1), windows.dtype), first])
    plain = step._replace(
        state_read=jnp.arange(1, num_sequences + 1, dtype=jnp.int32),
        state_write=jnp.zeros(num_sequences, jnp.int32),
        has_initial_state=before > 0,
        checkpoint_ends=None,
        checkpoint_pages=None,
    )
    out = causal_conv1d(x, states, weight, *plain, bias=bias, backend=backend).out

    def windows_of(ends: jax.Array) -> jax.Array:  # int32[S, n] new tokens -> [S, n, C, L]
        last = (before[:, None] + ends)[..., None]
        tokens = last - (last - 1 - jnp.arange(length)) % length  # int32[S, n, L]
        at = step.query_start_loc[:-1, None, None] + tokens - before[:, None, None] - 1
        new = jnp.moveaxis(x[jnp.clip(at, 0, x.shape[0] - 1)], 3, 2).astype(windows.dtype)
        is_new = (tokens > before[:, None, None])[:, :, None]
        return jnp.where(is_new, new, held[:, None])

    windows = _set_rows(windows, write, windows_of(q_lens[:, None])[:, 0])
    if step.checkpoint_ends is not None and step.checkpoint_pages is not None:
        ends = step.checkpoint_ends
        pages = jnp.where((ends > 0) & (q_lens > 0)[:, None], step.checkpoint_pages, 0)
        windows = _set_rows(windows, pages.reshape(-1), windows_of(ends).reshape(-1, num_channels, length))
    return out, windows


def _pages_and_tokens(told: StepOverRings) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """int32[S] each: pages to read and write, 0: none, computed tokens, new tokens."""
    step = told.step
    real = jnp.arange(step.state_read.shape[0]) < step.distribution[-1]
    q_lens = jnp.where(real, jnp.diff(step.query_start_loc), 0)
    goes_on = step.has_initial_state & (q_lens > 0)
    before = jnp.where(goes_on, told.seq_lens - q_lens, 0)
    return jnp.where(goes_on, step.state_read, 0), jnp.where(q_lens > 0, step.state_write, 0), before, q_lens


def _set_rows(array: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    """`array` with values [n, ...] in int32[n] pages, none twice; 0: nowhere."""
    shape = (pages.shape[0], *array.shape[1:])
    pages = jnp.where(pages > 0, pages, array.shape[0])
    return array.at[pages].set(jnp.broadcast_to(values, shape).astype(array.dtype), mode="drop")


__all__ = ["RingSizes", "RingStep", "convolve_in_ring", "update_in_ring"]

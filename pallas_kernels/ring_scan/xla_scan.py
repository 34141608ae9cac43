"""ring_scan in plain XLA, vectorised over sequences: what runs on a CPU, and where there is no kernel.

Flow:    api -> [ring_scan] -> outputs of the new tokens; states of the sequences that write one; entries into the
         rings -> (out, pages)

The outputs come from base states and rings as they are; only then states are written, and after these the rings. A
trip of either loop takes as many sequences as have states of `_TRIP_BYTES`. Slots without a token have a time step of 0
and no input: they neither decay nor add.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import XlaPath
from pallas_kernels.layouts import cdiv
from pallas_kernels.ring_scan.arguments import Options, Scan, ScanRing
from pallas_kernels.ring_scan.reference import Pages, Tokens, after_reading, with_skip
from pallas_kernels.ring_scan.slots import from_slots
from pallas_kernels.ring_step import RingArrays, RingStep, held_entries
from pallas_kernels.slab_pages import replaced
from pallas_kernels.ssm_update.running_sums import RunningSums
from pallas_kernels.state_step import with_states
from pallas_kernels.varying import vary_like

_TRIP_BYTES = 32 << 20

_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def path_over(states: jax.Array, ring: ScanRing, num_seqs: int) -> XlaPath:
    """What a call costs: states and rings are read, converted and read again."""
    num_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in (states, *ring))
    return XlaPath(3, num_seqs * num_bytes, "the states and rings of its sequences")


@functools.partial(jax.jit, static_argnames=("options", "trip_bytes"))
def ring_scan(
    inputs: Scan, pages: Pages, arrays: RingArrays, *, options: Options, trip_bytes: int = _TRIP_BYTES
) -> tuple[jax.Array, Pages]:
    """(out, pages) as `RingScanOutput`."""
    step = RingStep.of(inputs.x.shape[0], arrays, options.max_new_tokens)
    new = Tokens.of(inputs, options)
    size = min(step.read.shape[0], max(1, trip_bytes // (4 * math.prod(pages[0].shape[1:]))))
    with jax.named_scope("outputs"):
        out = _outputs(inputs, new, pages, step, options.max_new_tokens, size)
    with jax.named_scope("states"):
        pages = after_reading(pages, out)
        states = _written(inputs, new, pages, step, size)
    with jax.named_scope("entries"):
        return out, new.written(after_reading(replaced(pages, 0, states), out), step)


def num_trips(states_shape: tuple[int, ...], num_seqs: int, num_writing: int) -> dict[str, int]:
    """Runs of the loops over sequences with outputs, and over those that write a state."""
    size = min(num_seqs, max(1, _TRIP_BYTES // (4 * math.prod(states_shape[1:]))))
    return {"outputs": cdiv(num_seqs, size), "states": cdiv(num_writing, size)}


class _Window(NamedTuple):
    """Held tokens of n sequences, and new ones behind them; W slots, of which those without a token are 0."""

    x: jax.Array  # float32[n, W, H, P]
    dt: jax.Array  # float32[n, W, H]
    b: jax.Array  # float32[n, W, G, N]

    @classmethod
    def held(cls, pages: Pages, new: Tokens, page: jax.Array, count: jax.Array) -> _Window:
        """The first int32[n] `count` tokens of the rings of pages int32[n]; `new` says their shapes."""
        entries = (held_entries(array, page, count) for array in (pages[1], pages[2], pages[3]))
        return cls(*(from_slots(y, 2, x.shape[1:]) for x, y in zip(new, entries, strict=True)))

    def followed_by(self, new: Tokens, token: jax.Array) -> _Window:
        """The same with tokens int32[n, M] of `new` behind; none where out of range."""
        own = (y.at[token].get(mode="fill", fill_value=0).astype(jnp.float32) for y in new)
        return _Window(*(jnp.concatenate(both, axis=1) for both in zip(self, own, strict=True)))

    def sums(self, a: jax.Array) -> RunningSums:
        """Of the logarithms of decays, [n, H, W]."""
        return RunningSums.of(jnp.moveaxis(self.dt * a.astype(jnp.float32), 1, 2))


def _outputs(
    inputs: Scan, new: Tokens, pages: Pages, step: RingStep, most: int, size: int
) -> jax.Array:  # fmt: skip
    """Outputs [T, H, P] of the new tokens, 0 elsewhere."""
    num_tokens, num_heads, _ = inputs.x.shape
    num_groups, num_slots = inputs.b.shape[1], pages[1].shape[1]
    count, order = _those(step.num_new > 0, size)

    def trip(i: jax.Array, out: jax.Array) -> jax.Array:
        seq, is_real = _of_trip(order, i, step, size)
        page = jnp.where(is_real, step.read[seq], 0)
        place = jnp.arange(most)
        has_token = is_real[:, None] & (place < step.num_new[seq][:, None])
        token = jnp.where(has_token, step.starts[seq][:, None] + place, num_tokens)
        window = _Window.held(pages, new, page, jnp.where(is_real, step.held[seq], 0)).followed_by(new, token)
        sums = window.sums(inputs.a)
        c = inputs.c.at[token].get(mode="fill", fill_value=0).astype(jnp.float32)
        scores = jnp.repeat(_product("nmgk,nwgk->ngmw", c, window.b), num_heads // num_groups, axis=1)
        weights = sums.decays()[:, :, num_slots:] * scores * jnp.moveaxis(window.dt, 1, 2)[:, :, None]
        seen = _product("nhmw,nwhp->nmhp", weights, window.x)
        base = pages[0][page].astype(jnp.float32)
        base = base.reshape(-1, num_groups, num_heads // num_groups, *base.shape[2:])
        of_base = _product("ngrpk,nmgk->nmgrp", base, c).reshape(seen.shape)
        kept = jnp.moveaxis(sums.since_start()[:, :, num_slots:], 1, 2)
        found = seen + kept[..., None] * of_base + with_skip(inputs, jnp.minimum(token, num_tokens - 1))
        return out.at[token].set(found.astype(out.dtype), mode="drop")

    carry = vary_like(jnp.zeros_like(inputs.x), *inputs, *pages, *step)
    return lax.fori_loop(0, -(-count // size), trip, carry)


def _written(inputs: Scan, new: Tokens, pages: Pages, step: RingStep, size: int) -> jax.Array:
    """The states with those of the sequences that write one."""
    num_heads, num_groups = inputs.x.shape[1], inputs.b.shape[1]
    count, order = _those(step.state_page > 0, size)

    def trip(i: jax.Array, states: jax.Array) -> jax.Array:
        seq, is_real = _of_trip(order, i, step, size)
        page = jnp.where(is_real, step.read[seq], 0)
        count = jnp.where(is_real, step.held[seq], 0)
        held = _Window.held(replaced(pages, 0, states), new, page, count)
        sums = held.sums(inputs.a)
        weighed = (jnp.moveaxis(sums.until_end(), 1, 2) * held.dt)[..., None] * held.x
        weighed = weighed.reshape(*held.x.shape[:2], num_groups, num_heads // num_groups, -1)
        inflow = _product("nwgrp,nwgk->ngrpk", weighed, held.b).reshape(-1, *states.shape[1:])
        after = sums.of_all()[..., None] * states[page].astype(jnp.float32) + inflow
        return with_states(states, jnp.where(is_real, step.state_page[seq], 0), lax.optimization_barrier(after))

    return lax.fori_loop(0, -(-count // size), trip, vary_like(pages[0], *inputs, *pages, *step))


def _those(sequences: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(how many of the sequences bool[S]; int32[multiple of `size`] which ones, then S)."""
    num_seqs = sequences.shape[0]
    (order,) = jnp.nonzero(sequences, size=cdiv(num_seqs, size) * size, fill_value=num_seqs)
    return jnp.sum(sequences), order


def _of_trip(order: jax.Array, i: jax.Array, step: RingStep, size: int) -> tuple[jax.Array, jax.Array]:
    """(sequences int32[size] of trip `i`, bool[size] which are real)."""
    seq = lax.dynamic_slice_in_dim(order, i * size, size)
    num_seqs = step.read.shape[0]
    return jnp.minimum(seq, num_seqs - 1), seq < num_seqs

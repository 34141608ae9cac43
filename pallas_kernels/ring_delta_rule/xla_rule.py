"""ring_delta_rule in plain XLA, vectorised over sequences: what runs on a CPU, and where there is no kernel.

Flow:    api -> [ring_delta_rule] -> outputs and deltas of the new tokens; states of the sequences that write one;
         entries into the rings -> (out, states, ring)

The outputs come from base states and rings as they are; only then states are written, and after these the rings. A
trip of either loop takes as many sequences as have states of `_TRIP_BYTES`; on a CPU of what its caches hold.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import XlaPath
from pallas_kernels.gated_delta_rule.reference import by_head, inverse_length, prepared
from pallas_kernels.layouts import cdiv
from pallas_kernels.ring_delta_rule.arguments import DeltaRing, Inputs, Options, Pages
from pallas_kernels.ring_step import RingArrays, RingStep, held_entries, with_entries
from pallas_kernels.slab_pages import replaced
from pallas_kernels.state_step import with_states
from pallas_kernels.varying import vary_like

_TRIP_BYTES = 32 << 20
_CPU_TRIP_BYTES = 2 << 20

_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def path_over(states: jax.Array, ring: DeltaRing, num_seqs: int) -> XlaPath:
    """What a call costs: states and rings are read, converted and read again."""
    num_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in (states, *ring))
    return XlaPath(3, num_seqs * num_bytes, "the states and rings of its sequences")


@functools.partial(jax.jit, static_argnames=("options", "trip_bytes"))
def ring_delta_rule(
    inputs: Inputs, pages: Pages, arrays: RingArrays, *, options: Options, trip_bytes: int | None = None
) -> tuple[jax.Array, Pages]:
    """(out, pages) as `RingDeltaOutput`."""
    step = RingStep.of(inputs.v.shape[0], arrays, options.max_new_tokens)
    size = _sequences_of_trip(pages[0].shape, step.read.shape[0], trip_bytes)
    with jax.named_scope("outputs"):
        out, deltas = _outputs(inputs, pages, step, options, size)
        pages = _after_reading(pages, deltas)
    with jax.named_scope("states"):
        pages = replaced(pages, 0, _written(pages, step, options, size))
    with jax.named_scope("entries"):
        pages = _after_reading(pages, deltas)
        for i, entries in enumerate((inputs.k, deltas, inputs.g), start=1):
            pages = replaced(pages, i, with_entries(pages[i], step, entries))
    return out.astype(inputs.v.dtype), pages


def _after_reading(pages: Pages, found: jax.Array) -> Pages:
    """`pages`, which nobody reads any more to find something: what is written to them then needs no copy."""
    return lax.optimization_barrier((pages, found))[0]


def num_trips(states_shape: tuple[int, ...], num_seqs: int, num_writing: int) -> dict[str, int]:
    """Runs of the loops over sequences with outputs, and over those that write a state."""
    size = _sequences_of_trip(states_shape, num_seqs, None)
    return {"outputs": cdiv(num_seqs, size), "states": cdiv(num_writing, size)}


def _sequences_of_trip(states_shape: tuple[int, ...], num_seqs: int, trip_bytes: int | None) -> int:
    """Sequences that are taken at a time; None: by the platform."""
    if trip_bytes is None:
        trip_bytes = _CPU_TRIP_BYTES if jax.default_backend() == "cpu" else _TRIP_BYTES
    return min(num_seqs, max(1, trip_bytes // (4 * math.prod(states_shape[1:]))))


class _Held(NamedTuple):
    """The tokens held by n sequences, float32, by value head; what has no token is 0."""

    keys: jax.Array  # [n, R, H, K] normed
    deltas: jax.Array  # [n, R, H, V]
    kept: jax.Array  # [n, R, H, 1 or K] what decay leaves of each after the last
    base: jax.Array  # [n, H, 1 or K] and of the base state

    @classmethod
    def of(cls, pages: Pages, page: jax.Array, count: jax.Array, options: Options) -> _Held:
        """Of each `page` int32[n], so many tokens."""
        keys, deltas, decays = (held_entries(pages[i], page, count) for i in (1, 2, 3))
        if options.rule.use_qk_l2norm:
            keys = keys * inverse_length(keys)[..., None]
        keys = jnp.repeat(keys, deltas.shape[2] // keys.shape[2], axis=2)
        decays = decays if decays.ndim == 4 else decays[..., None]
        sums = lax.cumsum(decays, axis=1, reverse=True)
        later = jnp.pad(sums[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)])
        return cls(keys, deltas, jnp.exp(later), jnp.exp(sums[:, 0]))

    def moved_on(self, states: jax.Array) -> jax.Array:
        """float32[n, H, K, V] base states after the tokens."""
        return self.base[..., None] * states + _product("nrhk,nrhv->nhkv", self.kept * self.keys, self.deltas)


def _outputs(inputs: Inputs, pages: Pages, step: RingStep, options: Options, size: int) -> tuple[jax.Array, jax.Array]:
    """(outputs, deltas) float32[T, H, V] of the new tokens, 0 elsewhere."""
    num_tokens, num_seqs, most = inputs.v.shape[0], step.read.shape[0], options.max_new_tokens
    count, order = _those(step.num_new > 0, size)

    def trip(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seq = lax.dynamic_slice_in_dim(order, i * size, size)
        is_real = seq < num_seqs
        seq = jnp.minimum(seq, num_seqs - 1)
        num_new = jnp.where(is_real, step.num_new[seq], 0)
        page = jnp.where(is_real, step.read[seq], 0)
        held = _Held.of(pages, page, jnp.where(is_real, step.held[seq], 0), options)
        before = _Before(pages[0][page].astype(jnp.float32), held.base, held.kept * held.keys, held.deltas)

        def token(t: jax.Array, carry: tuple[_New, jax.Array, jax.Array]) -> tuple[_New, jax.Array, jax.Array]:
            window, *results = carry
            at = jnp.where(t < num_new, step.starts[seq] + t, num_tokens)
            new = Inputs(*(x.at[at].get(mode="fill", fill_value=0) for x in inputs))
            window, *found = window.after(by_head(prepared(new, options.rule)), before, t)
            out, deltas = (x.at[at].set(y, mode="drop") for x, y in zip(results, found, strict=True))
            return window, out, deltas

        window = vary_like(_New.none(held, most), *carry)
        return lax.fori_loop(0, jnp.max(num_new), token, (window, *carry))[1:]

    nothing = jnp.zeros(inputs.v.shape, jnp.float32)
    carry = vary_like((nothing, nothing), *inputs, *pages, *step)
    return lax.fori_loop(0, -(-count // size), trip, carry)


class _Before(NamedTuple):
    """What n sequences have before their new tokens."""

    states: jax.Array  # [n, H, K, V]
    kept: jax.Array  # [n, H, 1 or K] what decay leaves of these
    keys: jax.Array  # [n, R, H, K] what decay leaves of the held tokens' keys
    deltas: jax.Array  # [n, R, H, V]

    def seen(self, x: jax.Array) -> jax.Array:
        """[n, H, V] of x [n, H, K]."""
        of_states = jnp.sum(self.states * (self.kept * x)[..., None], axis=2)
        return of_states + _weighed(self.keys, x, self.deltas)


class _New(NamedTuple):
    """The new tokens of n sequences so far, 0 where there is none yet."""

    keys: jax.Array  # [n, M, H, K] what decay leaves of them
    deltas: jax.Array  # [n, M, H, V]
    passed: jax.Array  # [n, H, 1 or K] what decay leaves of everything before them

    @classmethod
    def none(cls, held: _Held, most: int) -> _New:
        """With room for M = `most`."""
        keys, deltas = (jnp.zeros((len(x), most, *x.shape[2:]), jnp.float32) for x in (held.keys, held.deltas))
        return cls(keys, deltas, jnp.ones_like(held.base))

    def after(self, new: Inputs, before: _Before, place: jax.Array) -> tuple[_New, jax.Array, jax.Array]:
        """(these and a token more of each, at `place`; its outputs, its deltas [n, H, V])."""
        q, k, v, g, beta = new
        decay = jnp.exp(g)
        passed, keys = self.passed * decay, self.keys * decay[:, None]
        of_key, of_query = (before.seen(passed * x) for x in (k, q))
        delta = beta[..., None] * (v - of_key - _weighed(keys, k, self.deltas))
        keys, deltas = (x.at[:, place].set(y) for x, y in ((keys, k), (self.deltas, delta)))
        return _New(keys, deltas, passed), of_query + _weighed(keys, q, deltas), delta


def _weighed(keys: jax.Array, x: jax.Array, deltas: jax.Array) -> jax.Array:
    """[n, H, V] deltas [n, W, H, V], weighed by the products of keys [n, W, H, K] with x [n, H, K]."""
    return jnp.sum(jnp.sum(keys * x[:, None], axis=-1)[..., None] * deltas, axis=1)


def _written(pages: Pages, step: RingStep, options: Options, size: int) -> jax.Array:
    """The states with those of the sequences that write one."""
    num_seqs = step.read.shape[0]
    count, order = _those(step.state_page > 0, size)

    def trip(i: jax.Array, states: jax.Array) -> jax.Array:
        seq = lax.dynamic_slice_in_dim(order, i * size, size)
        is_real = seq < num_seqs
        seq = jnp.minimum(seq, num_seqs - 1)
        page = jnp.where(is_real, step.read[seq], 0)
        held = _Held.of(replaced(pages, 0, states), page, jnp.where(is_real, step.held[seq], 0), options)
        after = lax.optimization_barrier(held.moved_on(states[page].astype(jnp.float32)))
        return with_states(states, jnp.where(is_real, step.state_page[seq], 0), after)

    return lax.fori_loop(0, -(-count // size), trip, vary_like(pages[0], *pages, *step))


def _those(sequences: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(how many of the sequences bool[S]; int32[multiple of `size`] which ones, then S)."""
    num_seqs = sequences.shape[0]
    (order,) = jnp.nonzero(sequences, size=cdiv(num_seqs, size) * size, fill_value=num_seqs)
    return jnp.sum(sequences), order

"""ring_delta_rule for TPU: XLA prepares the few numbers of the new tokens, one kernel does the rest.

Flow:    api -> [ring_delta_rule] -> tpu_ring -> (out, states, ring)

Decays per head are little beside all else: XLA takes them out of the ring, and puts those of the pages that get entries
back. Decays per channel are moved by the kernel.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta_rule.reference import by_head, prepared
from pallas_kernels.ring_delta_rule import tpu_ring
from pallas_kernels.ring_delta_rule.arguments import DeltaRing, Inputs, Options, Pages
from pallas_kernels.ring_step import RingArrays, RingStep
from pallas_kernels.slab_pages import SlabArray, replaced
from pallas_kernels.state_step import with_states
from pallas_kernels.tpu.mosaic import LANES
from pallas_kernels.tpu.slab_refs import reason_of_slabs

_MOST_NEW = 8  # tokens of a sequence


def reason_not_supported(
    v: jax.Array, g: jax.Array, states: jax.Array, ring: DeltaRing, options: Options
) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if jnp.float16 in (v.dtype, states.dtype, *(x.dtype for x in ring)):
        return "TPU has no arithmetic on float16; use bfloat16"
    for pages in (states, ring.keys, ring.deltas, *([ring.decays] if g.ndim == 3 else [])):
        reason = reason_of_slabs(pages)
        if reason is not None:
            return reason
    key_dim, value_dim = states.shape[2:]
    if key_dim % LANES or value_dim % LANES:
        return f"the TPU kernel takes keys and values in multiples of {LANES}, got {key_dim} and {value_dim}"
    if options.max_new_tokens > _MOST_NEW:
        return f"the TPU kernel takes up to {_MOST_NEW} new tokens of a sequence, got {options.max_new_tokens}"
    if g.ndim == 2 and isinstance(ring.decays, SlabArray) and math.prod(ring.decays.shape[1:]) % LANES:
        return (
            f"XLA takes decays out of slabs by rows of {LANES}, got {ring.decays.shape[1:]} of a page; make the ring "
            "longer"
        )
    return None


@functools.partial(jax.jit, static_argnames="options")
def ring_delta_rule(inputs: Inputs, pages: Pages, arrays: RingArrays, *, options: Options) -> tuple[jax.Array, Pages]:
    """(out, pages) as `RingDeltaOutput`."""
    step = RingStep.of(inputs.v.shape[0], arrays, options.max_new_tokens)
    rows = _Rows.of(step)
    at = rows.tokens(options.max_new_tokens, inputs.v.shape[0])
    new = Inputs(*(x.at[at].get(mode="fill", fill_value=0) for x in inputs))
    decays = None if inputs.g.ndim == 3 else pages[3][rows.read].astype(jnp.float32)
    tokens = _prepared(new, rows, pages, decays, options)
    table = jnp.concatenate([rows.read, rows.held, rows.state_page, rows.ring_page, rows.first_slot, rows.num_new])
    out, pages = tpu_ring.ring_rule(tokens, table, rows.num_rows, pages, use_qk_l2norm=options.rule.use_qk_l2norm)
    if decays is not None:
        pages = replaced(pages, 3, _with_decays(pages[3], decays, new.g, rows))
    outs = jnp.zeros(inputs.v.shape, inputs.v.dtype).at[at].set(out.astype(inputs.v.dtype), mode="drop")
    return outs, pages


class _Rows(NamedTuple):
    """The sequences that do anything, first; int32[S] each. Those behind them do nothing, and name page 0."""

    num_rows: jax.Array  # int32[]
    starts: jax.Array  # first new token
    num_new: jax.Array
    read: jax.Array
    held: jax.Array
    state_page: jax.Array
    ring_page: jax.Array
    first_slot: jax.Array

    @classmethod
    def of(cls, step: RingStep) -> _Rows:
        """Those of a step."""
        does = (step.num_new > 0) | (step.state_page > 0)
        num_seqs = does.shape[0]
        (order,) = jnp.nonzero(does, size=num_seqs, fill_value=num_seqs)
        fields = (step.starts, step.num_new, step.read, step.held, step.state_page, step.ring_page, step.first_slot)
        return cls(jnp.sum(does, dtype=jnp.int32), *(x.at[order].get(mode="fill", fill_value=0) for x in fields))

    def tokens(self, most: int, num_tokens: int) -> jax.Array:
        """int32[S, most] new tokens, `num_tokens` where there is none."""
        place = jnp.arange(most)
        return jnp.where(place < self.num_new[:, None], self.starts[:, None] + place, num_tokens)


def _prepared(new: Inputs, rows: _Rows, pages: Pages, decays: jax.Array | None, options: Options) -> tpu_ring.Prepared:
    """Tokens [S, most, ...] as the kernel takes them; `decays` float32[S, R, H] of the ring, or None: per channel."""
    seqs, most = new.v.shape[:2]
    flat = by_head(prepared(Inputs(*(x.reshape(seqs * most, *x.shape[2:]) for x in new)), options.rule))
    q, k, v, g, beta = (x.reshape(seqs, most, *x.shape[1:]) for x in flat)
    passed, rate = jnp.exp(jnp.cumsum(g, axis=1)), beta[..., None]
    scalars, keys = [_pairs(rate * k, k, g), _pairs(q, k, g)], new.k.astype(pages[1].dtype)
    if decays is None:
        gates = new.g.astype(pages[3].dtype)
        return tpu_ring.Prepared(q * passed, rate * k * passed, rate * v, _lanes(scalars), keys, gates)
    is_held = jnp.arange(decays.shape[1])[:, None] < rows.held[:, None, None]
    sums = lax.cumsum(jnp.where(is_held, decays, 0), axis=1, reverse=True)
    later = jnp.pad(sums[:, 1:], [(0, 0), (0, 1), (0, 0)])
    scalars += [(rate * passed)[..., 0], passed[..., 0], jnp.exp(sums[:, :1]), jnp.exp(later)]
    return tpu_ring.Prepared(q, k, rate * v, _lanes(scalars), keys, None)


def _pairs(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """float32[S, most**2, H]: `x[t] . (what decay leaves of k[i] at t)` for i <= t, else 0; place t * most + i."""
    most = x.shape[1]
    found = []
    for t in range(most):
        for i in range(most):
            decay = jnp.exp(jnp.sum(g[:, i + 1 : t + 1], axis=1))
            found.append(jnp.sum(x[:, t] * decay * k[:, i], axis=-1) if i <= t else jnp.zeros(x.shape[::2]))
    return jnp.stack(found, axis=1)


def _lanes(scalars: list[jax.Array]) -> jax.Array:
    """float32[S, H, lanes] of some [S, n, H], one behind the other: a multiple of 128 lanes, the last ones zero."""
    x = jnp.concatenate(scalars, axis=1)
    return jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, -x.shape[1] % LANES)])


def _with_decays(ring: jax.Array, held: jax.Array, new: jax.Array, rows: _Rows) -> jax.Array:
    """Decays [pages, R, H] with pages of `held` float32[S, R, H] and, from their first slots on, the new ones."""
    place = jnp.arange(ring.shape[1]) - rows.first_slot[:, None]
    place = jnp.where(place < rows.num_new[:, None], place, -1)
    new = jnp.take_along_axis(new.astype(jnp.float32), jnp.maximum(place, 0)[..., None], axis=1)
    return with_states(ring, rows.ring_page, jnp.where((place >= 0)[..., None], new, held))

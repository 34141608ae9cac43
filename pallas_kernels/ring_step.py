"""The step of an op over ring states: pages of a state and of what the tokens since then add to it.

Flow:    query_start_loc, distribution, pages by sequence -> [RingArrays] -> [RingStep] -> references, kernels

A page holds a base state, and a ring of R slots. Slot j has what the j-th token after the base adds to it; `num_held`
tokens are in the ring. A step reads both, computes the outputs of its new tokens, and puts these into the next slots:
it writes no state. Where the ring would run over, or where the sequence goes on in another page, the state after the
held tokens is written, and the ring starts anew with the new tokens. A rejected draft is thus in no state: the next
step says that fewer tokens are held.

Axis names: T new tokens (padded), S sequences (padded), R slots of a ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.schedule import Batch
from pallas_kernels.token_places import TokenPlaces


class RingArrays(NamedTuple):
    """What describes the sequences of a step, as the ops take it."""

    query_start_loc: jax.Array  # int32[S + 1]
    distribution: jax.Array  # int32[3]
    state_read: jax.Array  # int32[S] page whose state and ring the sequence goes on from; 0: from nothing
    state_write: jax.Array  # int32[S] page that gets the new tokens, and a state that is written; 0: none
    num_held: jax.Array  # int32[S] tokens in the ring of the page that is read
    writes_state: jax.Array  # bool[S] whether the state after them is written, and the ring starts anew


class RingStep(NamedTuple):
    """What every sequence and every new token of a step does; page 0 is none."""

    starts: jax.Array  # int32[S] first new token
    num_new: jax.Array  # int32[S] new tokens that have outputs: none where there are more than `max_new_tokens`
    read: jax.Array  # int32[S] page
    held: jax.Array  # int32[S] tokens in its ring
    state_page: jax.Array  # int32[S] page for the state after the held tokens, 0 where none is written
    ring_page: jax.Array  # int32[S] page for the new tokens, 0 where there are none
    first_slot: jax.Array  # int32[S] slot of the first new token
    seq: jax.Array  # int32[T]
    place: jax.Array  # int32[T] among the new tokens of its sequence, -1 for padding and tokens without outputs

    @classmethod
    def of(cls, num_tokens: int, step: RingArrays, max_new_tokens: int) -> RingStep:
        """Of a step with room for so many tokens."""
        q_lens = jnp.diff(step.query_start_loc)
        batch = Batch.of_step(q_lens, step.query_start_loc, step.distribution)
        seq, place = TokenPlaces.of_batch(batch, num_tokens)
        is_real = jnp.arange(q_lens.shape[0]) < step.distribution[2]
        num_new = jnp.where(batch.q_lens <= max_new_tokens, batch.q_lens, 0)
        writes = step.writes_state & is_real
        state_page = jnp.where(writes, step.state_write, 0)
        goes_on = (step.state_read > 0) & ((num_new > 0) | (state_page > 0))
        held = jnp.where(goes_on, step.num_held, 0)
        return cls(
            starts=batch.starts,
            num_new=num_new,
            read=step.state_read,
            held=held,
            state_page=state_page,
            ring_page=jnp.where(num_new > 0, step.state_write, 0),
            first_slot=jnp.where(writes, 0, held),
            seq=seq,
            place=jnp.where(place < num_new[seq], place, -1),
        )

    @property
    def token_pages(self) -> jax.Array:  # int32[T]
        """Page of each token's entry, 0: nowhere."""
        return jnp.where(self.place >= 0, self.ring_page[self.seq], 0)

    @property
    def token_slots(self) -> jax.Array:  # int32[T]
        """Slot of it in the page."""
        return self.first_slot[self.seq] + jnp.maximum(self.place, 0)


def with_entries(ring: jax.Array, step: RingStep, entries: jax.Array) -> jax.Array:
    """`ring` [pages, R, *entry] with the `entries` [T, *entry] of the step's tokens."""
    pages = step.token_pages
    pages = jnp.where(pages > 0, pages, ring.shape[0])
    return ring.at[pages, step.token_slots].set(entries.astype(ring.dtype), mode="drop")


def held_entries(ring: jax.Array, page: Any, held: Any) -> jax.Array:
    """float32[..., R, *entry] of pages int32[...], 0 in slots from `held` int32[...] on."""
    entries = ring[page].astype(jnp.float32)
    slots = jnp.arange(ring.shape[1])
    is_held = slots < jnp.asarray(held)[..., None]
    return jnp.where(is_held.reshape(*is_held.shape, *[1] * (ring.ndim - 2)), entries, 0)

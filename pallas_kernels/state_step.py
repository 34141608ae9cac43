"""The step of an op with recurrent states in pages: which states its sequences start from, and where they leave them.

Flow:    query_start_loc, distribution, pages by sequence -> [StepArrays] -> [StateStep] -> references, kernels

Axis names: T new tokens (padded), S sequences (padded), L states kept of a sequence: those after its last L new tokens,
the last token's in the last column.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.schedule import Batch
from pallas_kernels.token_places import TokenPlaces


class StepArrays(NamedTuple):
    """What describes the sequences of a step, as the ops take it."""

    query_start_loc: jax.Array  # int32[S + 1]
    distribution: jax.Array  # int32[3]
    state_read: jax.Array  # int32[S]
    state_write: jax.Array  # int32[S, L]; until `by_column` int32[S], too
    has_initial_state: jax.Array  # bool[S]

    def by_column(self) -> StepArrays:
        """The same with pages to write as columns."""
        write = self.state_write
        return self._replace(state_write=write[:, None]) if write.ndim == 1 else self


class StateStep(NamedTuple):
    """Where the new tokens stand in their sequences, and the pages of these; page 0 is none."""

    seq: jax.Array  # int32[T]
    place: jax.Array  # int32[T] among the new tokens of its sequence, -1 for padding
    q_lens: jax.Array  # int32[S] new tokens
    starts: jax.Array  # int32[S] first new token
    read: jax.Array  # int32[S] page of the initial state, 0 (the null page, zero) where there is none
    write: jax.Array  # int32[S, L] pages for the states after the last tokens, 0 where there is no such token either

    @classmethod
    def of(cls, num_tokens: int, step: StepArrays) -> StateStep:
        """The states of a step with room for so many tokens."""
        starts, width = step.query_start_loc, step.state_write.shape[1]
        batch = Batch.of_step(jnp.diff(starts), starts, step.distribution)
        seq, place = TokenPlaces.of_batch(batch, num_tokens)
        has_token = jnp.arange(width) >= width - batch.q_lens[:, None]
        write = jnp.where(has_token & (step.state_write > 0), step.state_write, 0)
        return cls(seq, place, batch.q_lens, batch.starts, jnp.where(step.has_initial_state, step.state_read, 0), write)

    @property
    def last_write(self) -> jax.Array:  # int32[S]
        """Page for the state after the last new token."""
        return self.write[:, -1]

    @property
    def num_kept(self) -> jax.Array:  # int32[S]
        """How many last tokens of a sequence have a page of their own; 1 where only the last may have."""
        width = self.write.shape[1]
        return jnp.max(jnp.where(self.write > 0, width - jnp.arange(width), 1), axis=1)

    @property
    def reads(self) -> jax.Array:  # int32[T]
        """Page of the initial state of each token's sequence."""
        return self.read[self.seq]

    @property
    def writes(self) -> jax.Array:  # int32[T]
        """Page for the state after each token, 0 for padding."""
        column = self.place - self.q_lens[self.seq] + self.write.shape[1]
        return jnp.where((self.place >= 0) & (column >= 0), self.write[self.seq, jnp.maximum(column, 0)], 0)

    def without_drafts(self) -> StateStep:
        """The same without the sequences that keep more states than their last: they have no tokens."""
        return self._replace(q_lens=jnp.where(self.num_kept > 1, 0, self.q_lens))


def with_states(states: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    """`states` with `values` [..., *state] in int32[...] pages, none twice; 0: nowhere."""
    pages = jnp.where(pages > 0, pages, states.shape[0])
    return states.at[pages].set(values.astype(states.dtype), mode="drop")

"""The step of an op with recurrent states in pages: which states its sequences start from, and where they leave them.

Flow:    query_start_loc, distribution, pages by sequence -> [StepArrays] -> [StateStep] -> references, kernels

A *checkpoint* is a state that a sequence leaves on its way, before its last new token. A *piece* of a sequence ends at
a checkpoint or where the sequence does; the next one goes on from its state. A step without checkpoints has one piece a
sequence.

Axis names: T new tokens (padded), S sequences (padded), L states kept of a sequence: those after its last L new tokens,
the last token's in the last column; k checkpoints of a sequence at most, R pieces: S * (k + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.schedule import Batch
from pallas_kernels.token_places import TokenPlaces


class StepArrays(NamedTuple):
    """What describes the sequences of a step, as the ops take it."""

    query_start_loc: jax.Array  # int32[S + 1]
    distribution: jax.Array  # int32[3]
    state_read: jax.Array  # int32[S]
    state_write: jax.Array  # int32[S, L]; until `by_column` int32[S], too
    has_initial_state: jax.Array  # bool[S]
    checkpoint_ends: jax.Array | None = None  # int32[S, k] new tokens of the sequence up to the state, 0: none
    checkpoint_pages: jax.Array | None = None  # int32[S, k] where it is left, 0: nowhere

    def by_column(self) -> StepArrays:
        """The same with pages to write as columns."""
        write = self.state_write
        return self._replace(state_write=write[:, None]) if write.ndim == 1 else self


class Checkpoints(NamedTuple):
    """The checkpoints of a step's sequences, in the order of tokens."""

    ends: jax.Array  # int32[S, k] new tokens up to the state; where there is none, those up to the one before, or 0
    pages: jax.Array  # int32[S, k] where the state is left, 0 where there is none

    @classmethod
    def of(cls, step: StepArrays, q_lens: jax.Array) -> Checkpoints | None:
        """Those of a step whose sequences have int32[S] new tokens; None: its callers name none."""
        ends, pages = step.checkpoint_ends, step.checkpoint_pages
        if ends is None or pages is None:
            return None
        exists = (pages > 0) & (ends > 0) & (ends < q_lens[:, None])
        return cls(lax.cummax(jnp.where(exists, ends, 0), axis=1), jnp.where(exists, pages, 0))


class TokenPieces(NamedTuple):
    """Per token the piece of its sequence that it is in."""

    place: jax.Array  # int32[T] among the tokens of the piece, -1 for padding
    length: jax.Array  # int32[T] tokens of the piece
    num_kept: jax.Array  # int32[T] last tokens of the piece of which one has a page; 1 where only the last may have


class Pieces(NamedTuple):
    """All pieces, in the order of tokens; some are empty."""

    starts: jax.Array  # int32[R] first new token
    q_lens: jax.Array  # int32[R] new tokens
    read: jax.Array  # int32[R] page of the initial state, 0 where there is none
    write: jax.Array  # int32[R] page for the state after the last token, 0: none
    before: jax.Array | None  # int32[R] new tokens of its sequence before it; None: all are whole sequences
    goes_on: jax.Array | None  # bool[R] whether it ends at a checkpoint


class StateStep(NamedTuple):
    """Where the new tokens stand in their sequences, and the pages of these; page 0 is none."""

    seq: jax.Array  # int32[T]
    place: jax.Array  # int32[T] among the new tokens of its sequence, -1 for padding
    q_lens: jax.Array  # int32[S] new tokens
    starts: jax.Array  # int32[S] first new token
    read: jax.Array  # int32[S] page of the initial state, 0 (the null page, zero) where there is none
    write: jax.Array  # int32[S, L] pages for the states after the last tokens, 0 where there is no such token either
    checkpoints: Checkpoints | None

    @classmethod
    def of(cls, num_tokens: int, step: StepArrays) -> StateStep:
        """The states of a step with room for so many tokens."""
        starts, width = step.query_start_loc, step.state_write.shape[1]
        batch = Batch.of_step(jnp.diff(starts), starts, step.distribution)
        seq, place = TokenPlaces.of_batch(batch, num_tokens)
        has_token = jnp.arange(width) >= width - batch.q_lens[:, None]
        write = jnp.where(has_token & (step.state_write > 0), step.state_write, 0)
        read = jnp.where(step.has_initial_state, step.state_read, 0)
        return cls(seq, place, batch.q_lens, batch.starts, read, write, Checkpoints.of(step, batch.q_lens))

    @property
    def last_write(self) -> jax.Array:  # int32[S]
        """Page for the state after the last new token."""
        return self.write[:, -1]

    @property
    def ends(self) -> jax.Array:  # int32[S, L] or, with checkpoints, int32[S, L + k]
        """How many new tokens are before each state that a sequence leaves."""
        last = self.q_lens[:, None] + jnp.arange(1 - self.write.shape[1], 1)
        return last if self.checkpoints is None else jnp.concatenate([last, self.checkpoints.ends], axis=1)

    @property
    def pages(self) -> jax.Array:  # as `ends`
        """Where each of these states is left, 0: nowhere."""
        if self.checkpoints is None:
            return self.write
        return jnp.concatenate([self.write, self.checkpoints.pages], axis=1)

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
        pages = jnp.where((self.place >= 0) & (column >= 0), self.write[self.seq, jnp.maximum(column, 0)], 0)
        if self.checkpoints is None:
            return pages
        ends, own = (x[self.seq] for x in self.checkpoints)
        return jnp.maximum(pages, jnp.max(jnp.where(ends == self.place[:, None] + 1, own, 0), axis=1))

    @property
    def token_pieces(self) -> TokenPieces:
        """The piece of each token."""
        q_lens, num_kept = self.q_lens[self.seq], self.num_kept[self.seq]
        if self.checkpoints is None:
            return TokenPieces(self.place, q_lens, num_kept)
        ends = self.checkpoints.ends[self.seq]
        is_behind = ends <= self.place[:, None]
        start = jnp.max(jnp.where(is_behind, ends, 0), axis=1)
        end = jnp.min(jnp.where(is_behind, q_lens[:, None], ends), axis=1)
        return TokenPieces(self.place - start, end - start, jnp.maximum(num_kept - (q_lens - end), 1))

    @property
    def pieces(self) -> Pieces:
        """The pieces of all sequences; those of one have successive rows."""
        if self.checkpoints is None:
            return Pieces(self.starts, self.q_lens, self.read, self.last_write, None, None)
        ends, pages = self.checkpoints
        q_lens = self.q_lens[:, None]
        borders = jnp.minimum(jnp.concatenate([jnp.zeros_like(q_lens), ends, q_lens], axis=1), q_lens)
        before = borders[:, :-1]
        rows = (
            self.starts[:, None] + before,
            jnp.diff(borders),
            jnp.where(before > 0, 0, self.read[:, None]),
            jnp.concatenate([pages, self.last_write[:, None]], axis=1),
            before,
            borders[:, 1:] < q_lens,
        )
        return Pieces(*(x.reshape(-1) for x in rows))

    def without_drafts(self) -> StateStep:
        """The same without the sequences that keep more states than their last: they have no tokens."""
        return self._replace(q_lens=jnp.where(self.num_kept > 1, 0, self.q_lens))


def with_states(states: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    """`states` with `values` [..., *state] in int32[...] pages, none twice; 0: nowhere."""
    pages = jnp.where(pages > 0, pages, states.shape[0])
    return states.at[pages].set(values.astype(states.dtype), mode="drop")

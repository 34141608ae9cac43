"""How recurrent kernels on NVIDIA GPUs go over a sequence's tokens with a state in registers.

Flow:    tile of a state -> [over_tokens]: load inputs ahead, advance, keep -> states in their pages
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

Inputs = TypeVar("Inputs")  # of one token, a pytree


class StateShare(Protocol[Inputs]):
    """The tokens and the part of their sequence's state that one thread block has."""

    @property
    def write(self) -> Any:
        """Reference to int32[sequences, states kept of each] pages, 0: none."""

    @property
    def checkpoints(self) -> Any:
        """References to `state_step.Checkpoints`, or None."""

    @property
    def seq(self) -> jax.Array:
        """Number of the sequence."""

    @property
    def first(self) -> jax.Array:
        """Its first token."""

    @property
    def end(self) -> jax.Array:
        """The one behind its last."""

    @property
    def num_together(self) -> int:
        """Tokens whose inputs are loaded together, ahead."""

    def load(self, token: jax.Array) -> Inputs:
        """Inputs of a token, or of the last one where it is beyond that."""

    def advance(self, token: jax.Array, state: jax.Array, inputs: Inputs) -> jax.Array:
        """The state after a token, whose output it stores."""

    def store_state(self, page: jax.Array, state: jax.Array) -> None:
        """Stores a state in a page."""


def over_tokens(share: StateShare[Inputs], state: jax.Array) -> None:
    """Goes over all tokens, from checkpoint to checkpoint."""
    if share.checkpoints is None:
        _over_piece(share, share.first, share.end, state)
        return
    ends, pages = share.checkpoints
    count = ends.shape[1]

    def piece(n: jax.Array, state: jax.Array) -> jax.Array:
        is_last, own = n == count, lax.min(n, jnp.int32(count - 1))
        token = jnp.where(n == 0, share.first, share.first + ends[share.seq, lax.max(n - 1, jnp.int32(0))])
        end = jnp.where(is_last, share.end, share.first + ends[share.seq, own])
        state = _over_piece(share, token, end, state)
        page = jnp.where(is_last, 0, pages[share.seq, own])
        pl.when(page > 0)(lambda: share.store_state(page, state))
        return state

    lax.fori_loop(0, count + 1, piece, state)


def _over_piece(share: StateShare[Inputs], token: jax.Array, end: jax.Array, state: jax.Array) -> jax.Array:
    """The state after the tokens up to `end`; those that may have pages for their states go one by one."""
    together, first = share.num_together, token

    def load_some(token: jax.Array) -> list[Inputs]:
        return [share.load(token + n) for n in range(together)]

    if together > 1:

        def some(i: jax.Array, carry: tuple[jax.Array, list[Inputs]]) -> tuple[jax.Array, list[Inputs]]:
            state, inputs = carry
            token = first + i * together
            coming = load_some(token + together)
            for n, one in enumerate(inputs):
                state = share.advance(token + n, state, one)
            return state, coming

        alone = share.write.shape[1]
        others = end - first - alone if share.checkpoints is None else lax.min(end, share.end - alone) - first
        trips = lax.div(lax.max(others, jnp.int32(0)), jnp.int32(together))
        state = lax.fori_loop(0, trips, some, (state, load_some(first)))[0]
        token = first + trips * together

    def one(token: jax.Array, state: jax.Array) -> jax.Array:
        state = share.advance(token, state, share.load(token))
        _keep(share, token, state)
        return state

    return lax.fori_loop(token, end, one, state)


def _keep(share: StateShare[Any], token: jax.Array, state: jax.Array) -> None:
    """Stores the state after a token, if it has a page."""
    write = share.write
    column = token - share.end + write.shape[1]
    page = write[share.seq, lax.max(column, jnp.int32(0))]

    @pl.when((column >= 0) & (page > 0))
    def _() -> None:
        share.store_state(page, state)

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
    """Goes over all tokens; the last, which may have pages for their states, one by one."""
    together, token = share.num_together, share.first

    def load_some(token: jax.Array) -> list[Inputs]:
        return [share.load(token + n) for n in range(together)]

    if together > 1:

        def some(i: jax.Array, carry: tuple[jax.Array, list[Inputs]]) -> tuple[jax.Array, list[Inputs]]:
            state, inputs = carry
            token = share.first + i * together
            coming = load_some(token + together)
            for n, one in enumerate(inputs):
                state = share.advance(token + n, state, one)
            return state, coming

        alone = share.write.shape[1]
        trips = lax.div(lax.max(share.end - share.first - alone, jnp.int32(0)), jnp.int32(together))
        state = lax.fori_loop(0, trips, some, (state, load_some(token)))[0]
        token = token + trips * together

    def one(token: jax.Array, state: jax.Array) -> jax.Array:
        state = share.advance(token, state, share.load(token))
        _keep(share, token, state)
        return state

    lax.fori_loop(token, share.end, one, state)


def _keep(share: StateShare[Any], token: jax.Array, state: jax.Array) -> None:
    """Stores the state after a token, if it has a page."""
    write = share.write
    column = token - share.end + write.shape[1]
    page = write[share.seq, lax.max(column, jnp.int32(0))]

    @pl.when((column >= 0) & (page > 0))
    def _() -> None:
        share.store_state(page, state)

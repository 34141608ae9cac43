"""How the work items of some query tiles are shared out among lanes that go through them side by side.

Flow:    KV tiles of each query tile -> [Lanes] -> items of a trip, the piece that each adds to -> [Lanes.merged]

Items come in the order of query tiles. Each lane has an equal run of them, whatever tiles they belong to: cost follows
the pages that a step sees, and one long sequence beside many short ones is split like all of them together.

    items      tile 0: 0 1 2 3 4 5 6 7 8    tile 1: 0    tile 2: 0 1
    lane       0 0 0   1 1 1   2 2 2                3            3 3
    piece      0 0 0   1 1 1   2 2 2                4            5 5        lane + tile: no two runs share one

A *piece* is what one lane adds up for one tile. No trip has two items of a piece, so that pieces are written without
conflicts and merged in an order of their own: equal steps give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.online_softmax import SoftmaxState


@dataclass(frozen=True)
class Lanes:
    """The items of C query tiles on n lanes."""

    ends: jax.Array  # int32[C] one after the last item of each tile
    num_lanes: int

    @classmethod
    def of(cls, num_items: jax.Array, num_lanes: int) -> Lanes:
        """The lanes of tiles with int32[C] items each."""
        return cls(jnp.cumsum(num_items, dtype=jnp.int32), num_lanes)

    @property
    def num_tiles(self) -> int:
        """C"""
        return self.ends.shape[0]

    @property
    def num_pieces(self) -> int:
        """Room for pieces."""
        return self.num_lanes + self.num_tiles

    @property
    def share(self) -> jax.Array:  # int32[]
        """Items of a lane, of all but the last ones: trips of the walk."""
        return -(-self.ends[-1] // self.num_lanes)

    @property
    def starts(self) -> jax.Array:  # int32[C]
        """First item of each tile."""
        return jnp.concatenate([jnp.zeros_like(self.ends[:1]), self.ends[:-1]])

    def items(self, trip: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(tile, its KV tile, piece; int32[n] each) of the items of a trip; beyond the last: a piece beyond all."""
        lane = jnp.arange(self.num_lanes, dtype=jnp.int32)
        item = lane * self.share + trip
        tile = jnp.sum(self.ends <= item[:, None], axis=1, dtype=jnp.int32)
        piece = jnp.where(tile < self.num_tiles, lane + tile, self.num_pieces)
        tile = jnp.minimum(tile, self.num_tiles - 1)
        return tile, item - self.starts[tile], piece

    def pieces_of_tiles(self) -> tuple[jax.Array, jax.Array]:
        """(first, last) piece int32[C] of each tile; of a tile without items both the same empty one."""
        share, tile = jnp.maximum(self.share, 1), jnp.arange(self.num_tiles, dtype=jnp.int32)
        first = self.starts // share + tile
        return first, jnp.maximum((self.ends - 1) // share + tile, first)

    def merged(self, pieces: SoftmaxState) -> SoftmaxState:
        """States of the C tiles, of the pieces' [num_pieces, ...]: pairs, then pairs of pairs."""
        first, last = self.pieces_of_tiles()
        piece = jnp.arange(self.num_pieces, dtype=jnp.int32)
        own_last = last[jnp.maximum(jnp.sum(first <= piece[:, None], axis=1) - 1, 0)]

        def double(carry: tuple[jax.Array, SoftmaxState]) -> tuple[jax.Array, SoftmaxState]:
            span, states = carry
            other = piece + span
            known = other <= own_last
            other = jnp.minimum(other, self.num_pieces - 1)

            def after(x: jax.Array, nothing: float) -> jax.Array:
                return jnp.where(known.reshape(-1, *[1] * (x.ndim - 1)), x[other], nothing)

            rest = SoftmaxState(after(states.m, -jnp.inf), after(states.weight, 0.0), after(states.total, 0.0))
            return 2 * span, online_softmax.merged(states, rest)

        longest = jnp.max(last - first)
        _, states = lax.while_loop(lambda carry: carry[0] <= longest, double, (jnp.ones_like(longest), pieces))
        return SoftmaxState(*(x[first] for x in states))

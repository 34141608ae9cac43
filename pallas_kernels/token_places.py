"""Sequence and position of every query token of a step, and loops over tiles of tokens by tiles of entries.

Flow:    lengths of the step -> [TokenPlaces] -> [over_entries] -> per token: entries that it names, a tile at a time
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.schedule import Batch

# A tree of arrays [tokens, ...].
ByToken = Any


class EntryTiles(NamedTuple):
    """How many tokens go together, and how many of their entries at a time."""

    tokens: int = 16
    entries: int = 128


class TokenPlaces(NamedTuple):
    """Where the query tokens stand."""

    seq: jax.Array  # int32[T] row of the token's sequence; any row for padding
    pos: jax.Array  # int32[T] position in the sequence, -1 for padding

    @classmethod
    def of_batch(cls, batch: Batch, num_tokens: int) -> TokenPlaces:
        """The places of `num_tokens` tokens, padding included."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        ends = batch.starts + batch.q_lens
        seq = jnp.sum(ends[None] <= token[:, None], axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, ends.shape[0] - 1)
        pos = token - ends[seq] + batch.seq_lens[seq]
        return cls(seq, jnp.where(token < jnp.sum(batch.q_lens), pos, -1))


def over_entries(
    body: Callable[[ByToken, ByToken, jax.Array], ByToken],
    carry: ByToken,
    inputs: ByToken,
    counts: jax.Array,  # int32[T] entries of each token
    sizes: EntryTiles = EntryTiles(),  # noqa: B008
) -> ByToken:
    """`carry` after `body(carry, inputs, entry)` for all tiles of entries of all tiles of tokens.

    `carry` and `inputs` come as the slices of a tile of tokens; `entry` int32[E] counts on from 0 in tiles, up to the
    largest count of the tile and beyond: `body` must leave the carry of tokens with fewer entries as it is.
    """
    num_tokens = counts.shape[0]
    size = min(num_tokens, sizes.tokens)
    entry = jnp.arange(sizes.entries, dtype=jnp.int32)

    def tiled(x: jax.Array) -> jax.Array:
        padding = [(0, -num_tokens % size), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])

    def tile(arguments: tuple[ByToken, ByToken, jax.Array]) -> ByToken:
        carry, inputs, counts = arguments
        trips = -(-jnp.max(counts) // sizes.entries)
        return lax.fori_loop(0, trips, lambda i, c: body(c, inputs, i * sizes.entries + entry), carry)

    tiles = lax.map(tile, jax.tree.map(tiled, (carry, inputs, counts)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], tiles)

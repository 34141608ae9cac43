"""The keys of all that decodes, shared out evenly to the thread blocks of a card.

Flow:    blocks of keys per unit -> [share_out] -> pieces -> attention kernels -> gpu.merge

All blocks of all *units* (a sequence and KV head, or a token and some of its heads) stand in one line, and each thread
block gets the same number of them. So a single long sequence fills the card as well as many short ones:

    unit              0           1     2                       3
    block             0  1  2  3  0  1  0  1  2  3  4  5  6  7  0  1
    thread block      0  0  0  0  1  1  1  1  2  2  2  2  3  3  3  3
    piece             0           2     3     4           5     6         (unit + thread block)

A *piece* is what one thread block does of one unit. `unit + thread block` rises along the line, so it names the piece,
and the pieces of a unit, and those of a thread block, are consecutive.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MOST_COMPARED = 2048  # counts of which each is compared with all


class Shares(NamedTuple):
    """Blocks of U units shared out to C thread blocks in U + C pieces."""

    unit: jax.Array  # int32[U + C] of each piece
    first: jax.Array  # int32[U + C] its first block, of the unit's
    end: jax.Array  # int32[U + C] one after its last
    blocks: jax.Array  # int32[C, 2] first piece of each thread block, and one after its last
    units: jax.Array  # int32[U, 2] first piece of each unit, and one after its last


def share_out(counts: jax.Array, num_blocks: int, *, repeats: int = 1) -> Shares:
    """The same number of blocks for each of `num_blocks` thread blocks, of units that have int32[U / repeats] `counts`.

    Each of `counts` is that of `repeats` successive units.
    """
    sums = _sums(counts)
    number = jnp.arange(1, repeats + 1, dtype=jnp.int32)
    ends = ((sums - counts)[:, None] * repeats + counts[:, None] * number).reshape(-1)
    begins = ends - jnp.repeat(counts, repeats)
    total = sums[-1] * repeats
    share = jnp.maximum(-(-total // num_blocks), 1)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    first_unit = _unit_of(ends, block * share)
    last_unit = _unit_of(ends, jnp.minimum((block + 1) * share, total) - 1)
    has_work = block * share < total
    first_piece = jnp.where(has_work, first_unit, ends.shape[0]) + block
    end_piece = jnp.where(has_work, last_unit + 1, ends.shape[0]) + block

    piece = jnp.arange(ends.shape[0] + num_blocks, dtype=jnp.int32)
    owner = jnp.maximum(jnp.sum(first_piece[None] <= piece[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    unit = jnp.clip(piece - owner, 0, ends.shape[0] - 1)
    first = jnp.maximum(owner * share, begins[unit]) - begins[unit]
    end = jnp.minimum((owner + 1) * share, ends[unit]) - begins[unit]

    number = jnp.arange(ends.shape[0], dtype=jnp.int32)
    is_empty = ends == begins
    first_of_unit = number + begins // share
    end_of_unit = jnp.where(is_empty, first_of_unit, number + (ends - 1) // share + 1)
    return Shares(
        unit,
        first,
        jnp.maximum(end, first),
        jnp.stack([first_piece, end_piece], axis=1),
        jnp.stack([first_of_unit, end_of_unit], axis=1),
    )


def _sums(counts: jax.Array) -> jax.Array:
    """int32[n] sums of the counts up to and with each: one launch, where a scan takes three."""
    if counts.shape[0] > _MOST_COMPARED:
        return jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(number <= number[:, None], counts, 0), axis=1, dtype=jnp.int32)


def _unit_of(ends: jax.Array, place: jax.Array) -> jax.Array:
    """The unit that holds each place of the line."""
    unit = jnp.sum(ends[None] <= place[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(unit, ends.shape[0] - 1)

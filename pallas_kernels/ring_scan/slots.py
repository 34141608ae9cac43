"""How the numbers of a token lie in a slot of a ring.

Flow:    numbers of tokens -> [to_slots] -> entries of slots -> [from_slots] -> numbers of tokens

A slot is an array of any shape whose first numbers are the token's. Plain ones are shaped as the token's numbers. Those
of TPU kernels are whole rows of 128 words (`layouts.slot_rows`), so that a DMA writes one without what is beside it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def to_slots(numbers: jax.Array, ring: jax.Array) -> jax.Array:
    """[n, *slot] in the ring's dtype, padded with zeros, of [n, ...]; `ring`: [pages, R, *slot]."""
    flat = numbers.reshape(numbers.shape[0], -1)
    size = math.prod(ring.shape[2:])
    return jnp.pad(flat, [(0, 0), (0, size - flat.shape[1])]).reshape(-1, *ring.shape[2:]).astype(ring.dtype)


def from_slots(entries: jax.Array, num_leading: int, shape: tuple[int, ...]) -> jax.Array:
    """[..., *shape], the numbers of tokens, of `entries` with `num_leading` dimensions before those of a slot."""
    leading = entries.shape[:num_leading]
    return entries.reshape(*leading, -1)[..., : math.prod(shape)].reshape(*leading, *shape)


__all__ = ["from_slots", "to_slots"]

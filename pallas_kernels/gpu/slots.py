"""Slots of the sequences that decode on the GPU: as many for each as one of them can have queries.

Flow:    sequences that decode -> [tokens_of_slots, slots_of_tokens] -> query tiles, gpu.merge

    slot     0  1  2  3  4  5      two of each sequence
    token    0  -  1  2  -  -      sequences of 1, 2 and no queries
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.schedule import Batch


def tokens_of_slots(batch: Batch, queries: int) -> jax.Array:
    """int32[S * queries] query token of each slot, -1: none."""
    place = jnp.arange(queries, dtype=jnp.int32)
    return jnp.where(place < batch.q_lens[:, None], batch.starts[:, None] + place, -1).reshape(-1)


def slots_of_tokens(batch: Batch, queries: int, num_tokens: int) -> jax.Array:
    """int32[num_tokens] slot of each token, -1: it is of no sequence."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    place = token - batch.starts
    is_own = (place >= 0) & (place < batch.q_lens)
    slot = jnp.arange(batch.starts.shape[0], dtype=jnp.int32) * queries + place
    return jnp.max(jnp.where(is_own, slot, -1), axis=1)

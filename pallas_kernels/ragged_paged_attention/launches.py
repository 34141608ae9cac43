"""A step's two launches: sequences that decode, and query tiles of all others.

Flow:    lengths, distribution -> [split] -> a Batch for each launch -> kernels -> [by_token] -> results of the step
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.schedule import Batch

Result = tuple[jax.Array, jax.Array | None]  # out [T, Hq, D], lse float32[T, Hq]


def split(seq_lens: jax.Array, query_start_loc: jax.Array, distribution: jax.Array) -> tuple[Batch, Batch]:
    """(sequences that decode, all others); in each the others' sequences have no query tokens."""
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    is_decode = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < distribution[0]
    return (
        batch._replace(q_lens=jnp.where(is_decode, batch.q_lens, 0)),
        batch._replace(q_lens=jnp.where(is_decode, 0, batch.q_lens)),
    )


def by_token(decoded: Result, tiled: Result, query_start_loc: jax.Array, distribution: jax.Array) -> Result:
    """Results of the launch that a token belongs to; 0 and -inf for padding."""
    token = jnp.arange(decoded[0].shape[0], dtype=jnp.int32)[:, None]
    is_decoded = token < query_start_loc[distribution[0]]
    is_real = token < query_start_loc[distribution[2]]
    out = jnp.where(is_real[..., None], jnp.where(is_decoded[..., None], decoded[0], tiled[0]), 0)
    if decoded[1] is None or tiled[1] is None:
        return out, None
    return out, jnp.where(is_real, jnp.where(is_decoded, decoded[1], tiled[1]), -jnp.inf)


def own_sequences(query_start_loc: jax.Array, num_tokens: int) -> jax.Array:
    """int32[T], the row of each token's sequence; of padding any."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    ended = jnp.sum(query_start_loc[1:][None] <= token[:, None], axis=1)
    return jnp.minimum(ended, query_start_loc.shape[0] - 2)

"""A step's two launches: sequences that decode, and query tiles of all others.

Flow:    lengths, distribution -> [split] -> a Batch for each launch -> kernels -> [by_token] -> results of the step
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch

Result = tuple[jax.Array, jax.Array | None]  # out [T, Hq, D], lse float32[T, Hq]


def split(
    seq_lens: jax.Array, query_start_loc: jax.Array, distribution: jax.Array, mask: MaskRule
) -> tuple[Batch, Batch]:
    """(sequences that decode, all others), of query tokens that see a key; in each the others' sequences have none."""
    batch = Batch.of_step(seq_lens, query_start_loc, distribution).seeing(mask)
    is_decode = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < distribution[0]
    return (
        batch._replace(q_lens=jnp.where(is_decode, batch.q_lens, 0)),
        batch._replace(q_lens=jnp.where(is_decode, 0, batch.q_lens)),
    )


def with_tiles(decoded: Result, tile: Callable[[], Result], decoding: Batch, others: Batch) -> Result:
    """Results of the step: `tile()` gives those of the others, and runs only where there are any.

    Where the step has but one token, `decoding` must hold it.
    What all layers share is better computed outside of `tile`, since XLA does not share what stands in branches.
    """
    tiled = decoded
    if decoded[0].shape[0] > 1:
        tiled = lax.cond(jnp.any(others.q_lens > 0), tile, lambda: decoded)
    return by_token(decoded, tiled, decoding, others)


def by_token(decoded: Result, tiled: Result, decoding: Batch, others: Batch) -> Result:
    """Results of the launch that a token belongs to; 0 and -inf for padding and for tokens that see no key."""
    is_decoded, is_tiled = (batch.covers(decoded[0].shape[0])[:, None] for batch in (decoding, others))
    rest = jnp.where(is_tiled[..., None], tiled[0], 0)
    out = jnp.where(is_decoded[..., None], decoded[0], rest)
    if decoded[1] is None or tiled[1] is None:
        return out, None
    return out, jnp.where(is_decoded, decoded[1], jnp.where(is_tiled, tiled[1], -jnp.inf))

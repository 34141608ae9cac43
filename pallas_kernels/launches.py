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
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    mask: MaskRule,
    sink_tokens: jax.Array | None = None,
) -> tuple[Batch, Batch]:
    """(sequences that decode, all others), of query tokens that see a key; in each the others' sequences have none."""
    batch = Batch.of_step(seq_lens, query_start_loc, distribution, sink_tokens).seeing(mask)
    is_decode = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < distribution[0]
    return (
        batch._replace(q_lens=jnp.where(is_decode, batch.q_lens, 0)),
        batch._replace(q_lens=jnp.where(is_decode, 0, batch.q_lens)),
    )


def with_tiles(decoded: Result, tile: Callable[[], Result], decoding: Batch, others: Batch) -> Result:
    """Results of the step: `tile()` gives those of the others, and runs only where there are any.

    What all layers share is better computed outside of `tile`, since XLA does not share what stands in branches.
    """
    tiled = lax.cond(jnp.any(others.q_lens > 0), tile, lambda: decoded)
    return by_token(decoded, tiled, decoding, others)


def by_token(decoded: Result, tiled: Result, decoding: Batch, others: Batch) -> Result:
    """Results of the launch that a token belongs to; 0 and -inf for padding and for tokens that see no key."""
    return _overlaid(decoded, decoding, of_launch(tiled, others))


def of_launch(result: Result, batch: Batch) -> Result:
    """Results of a launch for the tokens of `batch`; 0 and -inf for all others."""
    out, lse = result
    return _overlaid(result, batch, (jnp.zeros_like(out), None if lse is None else jnp.full_like(lse, -jnp.inf)))


def _overlaid(result: Result, batch: Batch, rest: Result) -> Result:
    """`result` for the tokens of `batch`, `rest` for all others."""
    (out, lse), (other_out, other_lse) = result, rest
    own = batch.covers(out.shape[0])[:, None]
    out = jnp.where(own[..., None], out, other_out)
    return out, None if lse is None or other_lse is None else jnp.where(own, lse, other_lse)

"""Choosing tokens from logits inside the jitted step.

Flow:    logits, SamplingBatch -> [sample] -> SampledTokens -> host
Source:  Gumbel-max sampling; nucleus sampling (Holtzman et al., 2020)

The random key of a token is `fold_in(key(seed), position)`: it depends on the request's seed and the token's place in
its sequence and on nothing else, so samples do not change with batching, chunking or preemption.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.engine.sampling_table import SamplingBatch


class SampledTokens(NamedTuple):
    """What a step chose, a line per row of logits. A pytree of arrays."""

    token_ids: jax.Array  # int32[N]
    logprobs: jax.Array  # float32[N] log-probability of the token under the model (temperature 1, nothing masked)


def sample(
    logits: jax.Array,  # [N, V]
    batch: SamplingBatch,  # N lines
) -> SampledTokens:
    """One token per row. Work for random rows is skipped at run time where every row is greedy."""
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = batch.temperature > 0
    token_ids = jax.lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _draw(logits, batch), greedy),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return SampledTokens(token_ids, chosen - jax.nn.logsumexp(logits, axis=-1))


def _draw(logits: jax.Array, batch: SamplingBatch) -> jax.Array:  # int32[N]
    """A token per row at the row's temperature; rows of temperature 0 give an arbitrary one."""
    scaled = logits / jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    is_masked = (batch.temperature > 0) & ((batch.top_p < 1) | (batch.top_k > 0))
    scaled = jax.lax.cond(
        jnp.any(is_masked),
        lambda: jnp.where(is_masked[:, None] & ~_keep(scaled, batch), -jnp.inf, scaled),
        lambda: scaled,
    )
    seeds, positions = jnp.asarray(batch.seed), jnp.asarray(batch.position)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(seeds, positions, scaled.shape[-1])
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:  # float32[size]
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _keep(scaled: jax.Array, batch: SamplingBatch) -> jax.Array:  # bool[N, V]
    """Tokens in the top k and in the smallest set of best tokens whose probability reaches top p."""
    vocab_size = scaled.shape[-1]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(vocab_size)
    top_k = jnp.where(batch.top_k > 0, batch.top_k, vocab_size)[:, None]
    probabilities = jax.nn.softmax(jnp.where(rank < top_k, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (rank < top_k) & ((before < batch.top_p[:, None]) | (rank == 0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return scaled >= threshold

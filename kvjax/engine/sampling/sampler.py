"""Choosing tokens from logits inside the jitted step.

Flow:    logits, SamplingBatch, SamplerArrays -> [sample] -> SampledTokens -> host
Source:  Gumbel-max sampling; nucleus sampling (Holtzman et al., 2020); min-p (Nguyen et al., 2024, arXiv 2407.01082)

The random key of a token is `fold_in(key(seed), position)`: it depends on the request's seed and the token's place in
its sequence and on nothing else, so samples do not change with batching, chunking or preemption.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.engine.sampling.logit_edits import edited_logits
from kvjax.engine.sampling.sampler_state import SamplerArrays
from kvjax.engine.sampling.sampling_table import SamplingBatch


class BestTokens(NamedTuple):
    """The best tokens of rows, the best first, and where the chosen ones stand. A pytree of arrays."""

    token_ids: jax.Array  # int32[N, K]
    logprobs: jax.Array  # float32[N, K]
    ranks: jax.Array  # int32[N] of the chosen token, 1: no other is more likely


class TokenLogprobs(NamedTuple):
    """What the model makes of chosen tokens: at temperature 1, nothing masked. A pytree of arrays."""

    logprobs: jax.Array  # float32[N]
    best: BestTokens  # zeros where no row of the step asks


class SampledTokens(NamedTuple):
    """What a step chose, a line per row of logits. A pytree of arrays."""

    token_ids: jax.Array  # int32[N]
    logprobs: jax.Array | TokenLogprobs  # float32[N] under the model, with the best beside where steps have them


def sample(
    logits: jax.Array,  # [N, V]
    batch: SamplingBatch,  # N lines
    state: SamplerArrays | None = None,  # None: lines are not looked at
    *,
    num_best: int = 0,
) -> SampledTokens:
    """One token per row. Work for random rows is skipped at run time where every row is greedy and asks nothing."""
    logits = logits.astype(jnp.float32)
    greedy = first_best(logits)
    is_special = batch.temperature > 0
    if state is not None:
        is_special |= batch.line > 0
    token_ids = jax.lax.cond(jnp.any(is_special), lambda: _choose(logits, greedy, batch, state), lambda: greedy)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    if not num_best or state is None:
        return SampledTokens(token_ids, chosen - total)
    best = _best_of_some(logits, total, chosen, state.wants_best[batch.line], num_best)
    return SampledTokens(token_ids, TokenLogprobs(chosen - total, best))


def first_best(scores: jax.Array) -> jax.Array:  # float32[N, V] -> int32[N]
    """The smallest id of a best token of each row: two passes that XLA for CPU vectorises, as it does no argmax."""
    best = jnp.max(scores, axis=-1, keepdims=True)
    token_ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.min(jnp.where(scores == best, token_ids, scores.shape[-1] - 1), axis=-1)


def best_tokens(
    logits: jax.Array,  # float32[N, V]
    total: jax.Array,  # float32[N] logsumexp of them
    chosen: jax.Array,  # float32[N] logits of chosen tokens
    num_best: int,
) -> BestTokens:
    """The `num_best` best tokens of each row, the smaller id first where two are equal."""
    best, token_ids = jax.lax.top_k(logits, num_best)
    ranks = 1 + jnp.sum(logits > chosen[:, None], axis=-1, dtype=jnp.int32)
    return BestTokens(token_ids.astype(jnp.int32), best - total[:, None], ranks)


def score(logits: jax.Array, given: jax.Array, *, num_best: int) -> TokenLogprobs:  # [N, V], int32[N]
    """What the model makes of tokens that are given."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, given[:, None], axis=-1)[:, 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    return TokenLogprobs(chosen - total, best_tokens(logits, total, chosen, num_best))


def _best_of_some(
    logits: jax.Array, total: jax.Array, chosen: jax.Array, is_wanted: jax.Array, num_best: int
) -> BestTokens:
    rows = logits.shape[0]
    nothing = (jnp.zeros((rows, num_best), jnp.int32), jnp.zeros((rows, num_best)), jnp.zeros(rows, jnp.int32))
    return jax.lax.cond(
        jnp.any(is_wanted), lambda: best_tokens(logits, total, chosen, num_best), lambda: BestTokens(*nothing)
    )


def _choose(
    logits: jax.Array, greedy: jax.Array, batch: SamplingBatch, state: SamplerArrays | None
) -> jax.Array:  # int32[N]
    """The best token of greedy rows, a drawn one of the others; `greedy` are the best of unchanged logits.

    What steps without lines do is compiled by itself: they neither copy their logits nor look at the state.
    """
    if state is None:
        return _greedy_or_drawn(logits, greedy, batch, None)
    lines = jnp.asarray(batch.line)
    return jax.lax.cond(
        jnp.any(lines > 0),
        lambda: _choose_from_edited(logits, lines, batch, state),
        lambda: _greedy_or_drawn(logits, greedy, batch, None),
    )


def _choose_from_edited(
    logits: jax.Array, lines: jax.Array, batch: SamplingBatch, state: SamplerArrays
) -> jax.Array:  # int32[N]
    logits = edited_logits(logits, lines, jnp.asarray(batch.position), state)
    greedy = first_best(logits)
    return _greedy_or_drawn(logits, greedy, batch, state.values[lines, 3])


def _greedy_or_drawn(
    logits: jax.Array, greedy: jax.Array, batch: SamplingBatch, min_p: jax.Array | None
) -> jax.Array:  # int32[N]
    is_random = batch.temperature > 0
    return jax.lax.cond(
        jnp.any(is_random), lambda: jnp.where(is_random, _draw(logits, batch, min_p), greedy), lambda: greedy
    )


def _draw(logits: jax.Array, batch: SamplingBatch, min_p: jax.Array | None) -> jax.Array:  # int32[N]
    """A token per row at the row's temperature; rows of temperature 0 give an arbitrary one."""
    scaled = logits / jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    is_masked = jnp.asarray((batch.temperature > 0) & ((batch.top_p < 1) | (batch.top_k > 0)))
    if min_p is not None:
        scaled = jax.lax.cond(
            jnp.any(is_masked | (min_p > 0)), lambda: _masked(scaled, batch, is_masked, min_p), lambda: scaled
        )
    else:
        scaled = _best_kept(scaled, batch, is_masked)
    seeds, positions = jnp.asarray(batch.seed), jnp.asarray(batch.position)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(seeds, positions, scaled.shape[-1])
    return first_best(scaled + noise)


def _masked(scaled: jax.Array, batch: SamplingBatch, is_masked: jax.Array, min_p: jax.Array) -> jax.Array:
    """-inf for tokens that min-p, top k or top p leave out."""
    least = jnp.max(scaled, axis=-1) + jnp.log(min_p)  # -inf where min_p is 0
    return _best_kept(jnp.where(scaled < least[:, None], -jnp.inf, scaled), batch, is_masked)


def _best_kept(scaled: jax.Array, batch: SamplingBatch, is_masked: jax.Array) -> jax.Array:
    """-inf for tokens that top k or top p leave out."""
    return jax.lax.cond(
        jnp.any(is_masked),
        lambda: jnp.where(is_masked[:, None] & ~_keep(scaled, batch), -jnp.inf, scaled),
        lambda: scaled,
    )


def _gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:  # float32[size]
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _keep(scaled: jax.Array, batch: SamplingBatch) -> jax.Array:  # bool[N, V]
    """Tokens in the top k and in the smallest set of best tokens whose probability reaches top p."""
    vocab_size = scaled.shape[-1]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(vocab_size, dtype=jnp.int32)[None]
    top_k = jnp.where(batch.top_k > 0, batch.top_k, vocab_size)[:, None]
    probabilities = jax.nn.softmax(jnp.where(rank < top_k, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (rank < top_k) & ((before < batch.top_p[:, None]) | (rank == 0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return scaled >= threshold

"""What the model makes of tokens that are given, those of prompts, where a step is asked for it.

Flow:    hidden states of a step's tokens, the tokens behind them -> [score_given] -> the score_fn's results, by token

Logits of all tokens of a step are large, so they are made for `BLOCK_ROWS` tokens at a time, and only for blocks in
which a token is asked for: a step that asks for none pays for looking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

BLOCK_ROWS = 64

# (logits [B, vocab], tokens int32[B]) -> any pytree of arrays with leading axis B
ScoreFn: TypeAlias = Callable[[jax.Array, jax.Array], Any]


def score_given(
    score_fn: ScoreFn,
    logits_of: Callable[[jax.Array], jax.Array],  # [B, d] -> [B, vocab]
    hidden: jax.Array,  # [T, d]
    given: jax.Array,  # int32[T] the token behind each, -1: not asked for
) -> Any:
    """The score_fn's results with leading axis T; zeros for blocks in which nothing is asked for."""
    num_tokens = hidden.shape[0]
    size = min(num_tokens, BLOCK_ROWS)
    padding = -num_tokens % size
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
    given = jnp.pad(given, (0, padding), constant_values=-1).reshape(-1, size)

    def score(hidden: jax.Array, given: jax.Array) -> Any:
        return score_fn(logits_of(hidden), jnp.maximum(given, 0))

    shapes = jax.eval_shape(score, hidden[0], given[0])

    def score_block(block: tuple[jax.Array, jax.Array]) -> Any:
        return jax.lax.cond(
            jnp.any(block[1] >= 0),
            score,
            lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            *block,
        )

    blocks = jax.lax.map(score_block, (hidden, given))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], blocks)


__all__ = ["ScoreFn", "score_given"]

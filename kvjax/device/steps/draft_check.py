"""Which drafts of a step are accepted, found on the device, so that the host reads tokens and counts at once.

Flow:    drafts among the token ids of a step, tokens sampled at each row of logits -> [accept_drafts] -> StepOutput
Source:  sampling with noise that depends on seed and position alone makes a sample a function of the prefix, so the
         drafts that equal the samples are those of the target (Daliri, Musco, Suresh, 2024, arXiv 2408.07978)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.default_rules import by_default_rules


@by_default_rules
def accept_drafts(
    drafts: jax.Array,  # int32[N] the step's token of each row of logits: from a request's second row on, its drafts
    tokens: jax.Array,  # int32[N] sampled at each row
    logits_starts: jax.Array,  # int32[S + 1] rows of each sampling request, constant after the last
    num_drafts: int,  # most of any request
) -> tuple[jax.Array, jax.Array]:
    """(newest token int32[S], accepted drafts int32[S]) of each sampling request, 0 behind the last.

    Accepted is the longest prefix of a request's drafts that equals what the rows before them sample; the row of the
    last accepted one samples the newest token.
    """
    starts, counts = logits_starts[:-1], jnp.diff(logits_starts) - 1
    place = jnp.arange(num_drafts)
    judged = jnp.clip(starts[:, None] + place, 0, tokens.shape[0] - 1)  # int32[S, num_drafts] rows that judge a draft
    draft = drafts[jnp.minimum(judged + 1, tokens.shape[0] - 1)]
    is_right = (tokens[judged] == draft) & (place < counts[:, None])
    num_accepted = jnp.sum(jnp.cumprod(is_right.astype(jnp.int32), axis=1), axis=1)
    newest = tokens[jnp.clip(starts + num_accepted, 0, tokens.shape[0] - 1)]
    return jnp.where(counts >= 0, newest, 0), num_accepted


__all__ = ["accept_drafts"]

"""Sampling written from its definitions, one row in numpy: the oracle of the sampler's tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.engine import SamplingParams


def edited(
    logits: np.ndarray,  # float32[V]
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Sequence[int] = (),
    allowed_now: Sequence[int] | None = None,  # by a matcher
) -> np.ndarray:  # float32[V]
    """Logits as `SamplingParams` says that they are changed, a token at a time."""
    logits = logits.astype(np.float32).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        logits[list(stop_token_ids)] = -np.inf
    for token in set(prompt) | set(output):
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(output).items():
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(count) + np.float32(params.presence_penalty)
    logits[list(params.bad_token_ids)] = -np.inf
    for allowed in (params.allowed_token_ids, allowed_now):
        if allowed is not None:
            logits[[token for token in range(logits.size) if token not in set(allowed)]] = -np.inf
    return logits


def chosen(
    logits: np.ndarray,  # float32[V], edited
    params: SamplingParams,
    seed: int,
    position: int,
) -> int:
    """The token at `position` of its sequence."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = (logits / np.float32(params.temperature)).astype(np.float64)
    probabilities = np.exp(scaled - scaled.max())
    kept = probabilities >= params.min_p * probabilities.max()
    probabilities = np.where(kept, probabilities, 0)
    if params.top_k:
        kept &= probabilities >= np.sort(probabilities)[::-1][min(params.top_k, logits.size) - 1]
        probabilities = np.where(kept, probabilities, 0)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept[order[(before >= params.top_p) & (np.arange(order.size) > 0)]] = False
    key = jax.random.fold_in(jax.random.key(np.uint32(seed)), np.int32(position))
    noise = np.asarray(jax.random.gumbel(key, logits.shape, np.float32))
    return int(np.where(kept, (logits / np.float32(params.temperature)) + noise, -np.inf).argmax())

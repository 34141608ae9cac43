"""A model of two functions and a tree of weights, for those who write plain JAX.

Flow:    forward, logits, weights -> [FunctionModel] -> `make_update_step`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from kvjax.device.layers.step_cache import StepCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FunctionModel:
    """`forward(weights, token_ids, positions, cache)` and `head(weights, hidden)` as the model of an update step."""

    weights: Any  # pytree
    # (weights, int32[T] token ids, int32[T] positions, cache) -> hidden [T, d]
    forward: Callable[..., jax.Array] = field(metadata={"static": True})
    # (weights, hidden [N, d]) -> logits [N, vocab]
    head: Callable[..., jax.Array] = field(metadata={"static": True})

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: StepCache, **inputs: Any) -> jax.Array:
        """Hidden states [T, d]; `inputs` are those of steps with embeddings."""
        return self.forward(self.weights, token_ids, positions, cache, **inputs)

    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, d] -> [N, vocab]
        """Logits of some hidden states."""
        return self.head(self.weights, hidden)


__all__ = ["FunctionModel"]

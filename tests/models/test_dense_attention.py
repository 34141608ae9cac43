"""DenseAttention against a loop over queries."""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from kvjax.device.attention_options import AttentionOptions
from kvjax.models import DenseAttention


def looped_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: AttentionOptions) -> np.ndarray:
    """One query and head at a time."""
    out = np.zeros_like(q)
    for position in range(len(q)):
        start = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = k[start : position + 1, kv_head] @ q[position, head] * options.sm_scale
            if options.soft_cap is not None:
                scores = options.soft_cap * np.tanh(scores / options.soft_cap)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ v[start : position + 1, kv_head]
    return out


class TestAgainstALoop(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(window=[None, 1, 5, 12, 13], soft_cap=[None, 2.0])
    def test_agrees_with_a_loop_over_queries(self, window: int | None, soft_cap: float | None) -> None:
        random = np.random.default_rng(0)
        q = random.normal(size=(13, 4, 8)).astype(np.float32)
        k, v = random.normal(size=(2, 13, 2, 8)).astype(np.float32)
        options = AttentionOptions(sm_scale=0.4, sliding_window=window, soft_cap=soft_cap)
        attend = self.variant(lambda *qkv: DenseAttention()("layers.0", *qkv, options))
        out = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
        chex.assert_trees_all_close(out, looped_attention(q, k, v, options), atol=1e-5, rtol=1e-7, strict=True)


@pytest.mark.parametrize("option", [{"attention_chunk_size": 4}, {"num_sink_tokens": 1}, {"sinks": jnp.zeros(1)}])
def test_options_of_serving_are_refused(option: dict[str, Any]) -> None:
    x = jnp.zeros((3, 1, 8))
    with pytest.raises(NotImplementedError, match=f"layers.1: expected dense attention .* got {next(iter(option))}"):
        DenseAttention()("layers.1", x, x, x, AttentionOptions(sm_scale=1.0, **option))

"""DenseAttention against a loop over queries."""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.models import DenseAttention


def seen_keys(position: int, options: AttentionOptions) -> list[int]:
    """The keys that the query at `position` sees, as AttentionOptions says."""
    window, chunk = options.sliding_window, options.attention_chunk_size
    return [
        key
        for key in range(position + 1)
        if key < options.num_sink_tokens
        or ((window is None or key > position - window) and (chunk is None or key // chunk == position // chunk))
    ]


def looped_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: AttentionOptions) -> np.ndarray:
    """One query and head at a time."""
    out = np.zeros_like(q)
    for position in range(len(q)):
        keys = seen_keys(position, options)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = k[keys, kv_head] @ q[position, head] * options.sm_scale
            if options.soft_cap is not None:
                scores = options.soft_cap * np.tanh(scores / options.soft_cap)
            weights, rest = np.exp(scores), 0.0 if options.sinks is None else np.exp(np.asarray(options.sinks)[head])
            out[position, head] = weights / (weights.sum() + rest) @ v[keys, kv_head]
    return out


class TestAgainstALoop(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(window=[None, 1, 5, 12, 13], soft_cap=[None, 2.0])
    def test_agrees_with_a_loop_over_queries(self, window: int | None, soft_cap: float | None) -> None:
        self.check(AttentionOptions(sm_scale=0.4, sliding_window=window, soft_cap=soft_cap))

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(
        bounds=[{"attention_chunk_size": 1}, {"attention_chunk_size": 5}, {"attention_chunk_size": 13},
                {"attention_chunk_size": 6, "sliding_window": 4}, {"sliding_window": 4, "num_sink_tokens": 2},
                {"sliding_window": 3}, {}],
        has_sinks=[False, True],
    )  # fmt: skip
    def test_agrees_with_chunks_and_sinks_of_both_kinds(self, bounds: dict[str, int], has_sinks: bool) -> None:
        sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
        self.check(AttentionOptions(sm_scale=0.4, sinks=sinks, **bounds))

    def check(self, options: AttentionOptions) -> None:
        random = np.random.default_rng(0)
        q = random.normal(size=(13, 4, 8)).astype(np.float32)
        k, v = random.normal(size=(2, 13, 2, 8)).astype(np.float32)
        attend = self.variant(lambda *qkv: DenseAttention()("layers.0", *qkv, options))
        out = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
        chex.assert_trees_all_close(out, looped_attention(q, k, v, options), atol=1e-5, rtol=1e-7, strict=True)


def test_a_layer_without_keys_attends_to_those_of_its_owner() -> None:
    q, other, k, v = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 2, 8)), jnp.float32)
    options = AttentionOptions(sm_scale=0.4, sliding_window=3)
    attend = DenseAttention({"layers.1": "layers.0"})
    attend("layers.0", q, k, v, options)
    shared = attend("layers.1", other, None, None, options)
    chex.assert_trees_all_equal(shared, DenseAttention()("layers.1", other, k, v, options))


@pytest.mark.parametrize("shared_layers", [{}, {"layers.1": "layers.0"}])
def test_a_layer_without_keys_needs_an_owner_that_ran(shared_layers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"layers\.1: expected K and V, got none"):
        DenseAttention(shared_layers)("layers.1", jnp.zeros((3, 1, 8)), None, None, AttentionOptions(sm_scale=1.0))


@pytest.mark.parametrize("option", [{"k_scale": jnp.ones(())}, {"v_scale": jnp.ones(())}])
def test_scales_of_pages_are_refused(option: dict[str, Any]) -> None:
    x = jnp.zeros((3, 1, 8))
    with pytest.raises(NotImplementedError, match=f"layers.1: expected dense attention .* got {next(iter(option))}"):
        DenseAttention()("layers.1", x, x, x, AttentionOptions(sm_scale=1.0, **option))

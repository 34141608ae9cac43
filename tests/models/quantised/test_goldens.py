"""Quantised checkpoints give the logits and the greedy tokens of transformers' dequantised models.

The goldens are those of scripts/make_quantised_goldens.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.engine import EngineConfig
from kvjax.models import DenseAttention, load_model
from tests.models.families import RecordingEngine, drain, greedy_params

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
CACHED = ("deepseek_v4",)  # whose layers compute with a cache alone
ATOL = 1e-4  # of float32 logits
MAX_SET_BYTES = 4_000_000


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CACHED])
def test_logits_and_greedy_tokens_are_those_of_the_dequantised_model(name: str) -> None:
    """In one pass over prompt and continuation, as the goldens were made."""
    with np.load(GOLDENS / name / "goldens.npz") as golden:
        prompt, positions, greedy = golden["prompt"], golden["positions"], golden["greedy"]
        expected, decode = golden["logits"], golden["decode_logits"]
    module: Any = load_model(GOLDENS / name, "float32").module
    tokens = jnp.asarray(np.append(prompt, greedy[:-1]))
    logits = np.asarray(module.logits(module(tokens, jnp.arange(tokens.size), DenseAttention())))
    np.testing.assert_allclose(logits[positions], expected, atol=ATOL, rtol=0)
    np.testing.assert_allclose(logits[len(prompt) - 1 :], decode, atol=ATOL, rtol=0)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == greedy.tolist()


@pytest.mark.parametrize("name", CACHED)
def test_an_engine_gives_those_of_the_dequantised_model(name: str) -> None:
    """With caches as of plain weights, since groups of fp8 do not divide the latents."""
    with np.load(GOLDENS / name / "goldens.npz") as golden:
        prompt, greedy, decode = golden["prompt"], golden["greedy"], golden["decode_logits"]
    config = EngineConfig(block_size=128, num_blocks=60, max_model_len=256, max_num_batched_tokens=160, max_buckets=1)
    engine = RecordingEngine(load_model(GOLDENS / name, "float32"), config)
    request_id = engine.add_request(prompt, greedy_params(len(greedy)))
    np.testing.assert_array_equal(drain(engine)[request_id].output_token_ids, greedy)
    np.testing.assert_allclose(np.stack(engine.logits[request_id]), decode, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_rounded_once_to_the_dtype_that_is_asked_for(name: str) -> None:
    whole, rounded = (nnx.state(load_model(GOLDENS / name, dtype).module) for dtype in ("float32", "bfloat16"))
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one.astype(other.dtype), other), whole, rounded)


def test_the_set_is_small() -> None:
    assert sum(file.stat().st_size for file in GOLDENS.rglob("*.*")) < MAX_SET_BYTES

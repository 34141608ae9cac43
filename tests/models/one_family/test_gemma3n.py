"""Gemma 3n text: what its config.json may leave out, its checkpoints, and its parts against their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvjax.configs import load_model_config
from kvjax.errors import ConfigError
from kvjax.models import ModelConfig, build_model, load_model
from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.gemma3n import AltUpConfig
from kvjax.models.decoders.gemma3n import largest_only
from kvjax.models.layers.altup import AltUp
from kvjax.models.layers.make import Make
from kvjax.models.save import save_weights
from tests.models.configs import llama_dict


def gemma3n_dict(**changes: Any) -> dict[str, Any]:
    """A small Gemma 3n: ten layers, the last five of which share K and V."""
    base = {"num_hidden_layers": 10, "num_kv_shared_layers": 5, "vocab_size_per_layer_input": 60, "head_dim": 8}
    sizes = {"hidden_size_per_layer_input": 4, "laurel_rank": 4, "max_position_embeddings": ...}
    return llama_dict(architectures=["Gemma3nForCausalLM"], **base | sizes | changes)


def test_keys_that_files_leave_out_are_those_of_transformers() -> None:
    config: Any = ModelConfig.from_dict(gemma3n_dict(hidden_size_per_layer_input=..., vocab_size_per_layer_input=...))
    assert config.layer_types == (SLIDING, SLIDING, SLIDING, SLIDING, FULL) * 2
    assert (config.per_layer_size, config.per_layer_vocab_size, config.sliding_window) == (256, 262_144, 512)
    assert (config.max_model_len, config.sm_scale, config.final_logit_soft_cap) == (32_768, 1.0, 30.0)
    assert (config.rope.theta, config.rope_local.theta) == (1_000_000.0, 10_000.0)
    assert config.altup == AltUpConfig(num_streams=4, active=0, scales_output=True)
    assert (config.sparsities, config.intermediate_sizes) == ((0.0,) * 10, (48,) * 10)
    longer: Any = ModelConfig.from_dict(gemma3n_dict(num_hidden_layers=15))
    assert longer.sparsities == (0.95,) * 10 + (0.0,) * 5


def test_the_file_on_the_hub_is_read() -> None:
    config: Any = load_model_config("gemma-3n-e4b")
    assert (config.num_layers, config.num_own_layers, len(config.kv_cache_specs())) == (35, 20, 20)
    assert config.sparsities == (0.95,) * 10 + (0.0,) * 25
    assert (config.laurel_rank, config.per_layer_size, config.intermediate_size) == (64, 256, 16_384)


def test_the_last_layers_read_the_pages_of_the_last_of_their_type() -> None:
    config = ModelConfig.from_dict(gemma3n_dict())
    assert list(config.kv_cache_specs()) == [f"layers.{i}" for i in range(5)]
    assert config.shared_layers == {f"layers.{i}": "layers.4" if i == 9 else "layers.3" for i in range(5, 10)}


def test_layers_may_be_of_unlike_widths() -> None:
    config: Any = ModelConfig.from_dict(gemma3n_dict(intermediate_size=[48, 32] * 5))
    assert (config.intermediate_sizes, config.intermediate_size) == ((48, 32) * 5, 16)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers to leave a layer of each type with pages, got 6"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers to leave a layer of each type with pages, got 10"),
        ({"num_kv_shared_layers": -1}, "'num_kv_shared_layers' to be an integer >= 0, got -1"),
        ({"altup_active_idx": 4}, "expected altup_active_idx below 4, got 4"),
        ({"activation_sparsity_pattern": [1.0] * 10}, r"activation_sparsity_pattern in \[0, 1\), got \[1.0"),
        ({"activation_sparsity_pattern": [0.5]}, r"'activation_sparsity_pattern' to be 10 numbers or one, got \[0.5\]"),
        ({"intermediate_size": ["wide"] * 10}, "'intermediate_size' to be 10 numbers or one"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ModelConfig.from_dict(gemma3n_dict(**changes))


def test_a_multimodal_checkpoint_is_read_for_its_text_part(tmp_path: Path) -> None:
    """It has K and V of layers that do not use them, and towers of other modalities."""
    text = gemma3n_dict()
    module = build_model(ModelConfig.from_dict(text), rngs=nnx.Rngs(0))
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_weights(module, tmp_path, "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    unused = [f"model.language_model.layers.{name}.weight" for name in ("7.self_attn.k_proj", "9.self_attn.v_norm")]
    unused += [f"model.{name}.x" for name in ("audio_tower", "embed_audio", "embed_vision", "vision_tower")]
    save_file(renamed | dict.fromkeys(unused, np.zeros(3, np.float32)), tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(nnx.state(load_model(tmp_path, "float32").module), nnx.state(module))


def test_gates_below_a_quantile_of_their_normal_distribution_are_zero() -> None:
    """1.2815515655 is the normal distribution's quantile 0.9."""
    gate = np.random.default_rng(0).normal(3.0, 2.0, size=(5, 1000)).astype(np.float32)
    bound = gate.mean(-1, keepdims=True) + 1.2815515655 * gate.std(-1, keepdims=True)
    got = np.asarray(largest_only(jnp.asarray(gate), 0.9))
    np.testing.assert_allclose(got, np.maximum(gate - bound, 0), atol=1e-5)
    assert 0.08 < (got > 0).mean() < 0.12


def test_streams_are_predicted_and_corrected_one_token_and_stream_at_a_time() -> None:
    """Stream j is expected to be itself and a mix of all; it gets a share of what the active one was mistaken by."""
    config = AltUpConfig(num_streams=3, active=1, scales_output=True)
    altup = AltUp(6, config, eps=1e-6, make=Make(jnp.dtype("float32"), nnx.Rngs(0)))
    random = np.random.default_rng(0)
    streams, computed = random.normal(size=(3, 4, 6)), random.normal(size=(4, 6))
    predicting, correcting = (np.asarray(x.kernel[...]) for x in (altup.prediction_coefs, altup.correction_coefs))

    def modalities(x: np.ndarray) -> np.ndarray:
        return np.tanh(x / np.sqrt((x**2).mean() + 1e-6) / 6 @ np.asarray(altup.modality_router.kernel[...]))

    predicted, corrected = np.zeros_like(streams), np.zeros_like(streams)
    for token in range(4):
        mix = (modalities(streams[1, token]) @ predicting).reshape(3, 3)
        for j in range(3):
            predicted[j, token] = streams[j, token] + sum(mix[j, i] * streams[i, token] for i in range(3))
        share = modalities(computed[token]) @ correcting + 1
        for j in range(3):
            corrected[j, token] = predicted[j, token] + share[j] * (computed[token] - predicted[1, token])
    got = altup.predict(jnp.asarray(streams, jnp.float32))
    np.testing.assert_allclose(got, predicted, atol=1e-5)
    np.testing.assert_allclose(altup.correct(got, jnp.asarray(computed, jnp.float32)), corrected, atol=1e-5)

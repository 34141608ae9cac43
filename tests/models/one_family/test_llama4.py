"""Llama 4 text: what its config.json may leave out, its multimodal checkpoints, temperatures of queries."""

from __future__ import annotations

import json
import math
import shutil
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
from kvjax.models import ModelConfig, load_model
from kvjax.models.config import CHUNKED, FULL
from kvjax.models.configs.attention_decoder import TemperatureConfig
from kvjax.models.layers.attention.temperature import query_scales
from kvjax.models.layers.rotary import inverse_frequencies
from tests.models.configs import llama_dict
from tests.models.golden_models import model_folder


def llama4_dict(**changes: Any) -> dict[str, Any]:
    """A small Llama 4."""
    return llama_dict(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", **{"num_hidden_layers": 8} | changes
    )


def test_keys_that_files_leave_out_are_those_of_transformers() -> None:
    config: Any = ModelConfig.from_dict(llama4_dict())
    assert config.layer_types == (CHUNKED, CHUNKED, CHUNKED, FULL) * 2
    assert [config.rope_of(layer) is None for layer in range(8)] == [False, False, False, True] * 2
    assert (config.attention_chunk_size, config.head_dim, config.rope.theta) == (8192, 128, 500_000.0)
    assert (config.intermediate_size, config.experts.intermediate_size) == (16_384, 48)
    assert (config.experts.num_experts, config.experts.top_k, config.expert_layers) == (16, 1, (True,) * 8)
    assert (config.qk_l2_norm, config.temperature) == (True, TemperatureConfig(floor=8192, scale=0.1))


def test_experts_stand_every_few_layers_or_where_a_list_says() -> None:
    every: Any = ModelConfig.from_dict(llama4_dict(interleave_moe_layer_step=2))
    assert every.expert_layers == (False, True) * 4
    listed: Any = ModelConfig.from_dict(llama4_dict(interleave_moe_layer_step=2, moe_layers=[0, 5]))
    assert listed.expert_layers == (True, False, False, False, False, True, False, False)


@pytest.mark.parametrize(("value", "is_tuned"), [(True, True), (4, True), (False, False), (0, False)])
def test_temperature_tuning_is_a_flag_or_a_number(value: Any, is_tuned: bool) -> None:
    """Files on the Hub have 4."""
    config: Any = ModelConfig.from_dict(llama4_dict(attn_temperature_tuning=value))
    assert (config.temperature is not None) == is_tuned


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"no_rope_layers": [1, 0]}, "expected 8 no_rope_layers, got 2"),
        (
            {"layer_types": ["sliding_attention"] * 8},
            "among full_attention, chunked_attention, got sliding",
        ),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ModelConfig.from_dict(llama4_dict(**changes))


def test_scout_s_low_and_high_frequencies_are_one() -> None:
    """Wavelengths longer than pretraining's 8,192 tokens are stretched 16 times, the others kept."""
    rope = load_model_config("llama-4-scout").rope
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 1.0)
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    is_long = 2 * math.pi / plain > 8192
    expected = np.where(is_long, plain / 16, plain)
    np.testing.assert_allclose(inverse_frequencies(rope, 128, 131_072), expected, rtol=1e-6)


def test_queries_are_multiplied_by_the_logarithm_of_their_position() -> None:
    scales = query_scales(jnp.asarray([0, 14, 15, 16, 1000]), TemperatureConfig(floor=16, scale=0.4))
    by_hand = [1 + 0.4 * math.log(1 + (p + 1) // 16) for p in (0, 14, 15, 16, 1000)]
    np.testing.assert_allclose(scales, by_hand, rtol=1e-6)


def test_the_text_part_of_a_multimodal_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    shutil.copytree(model_folder("llama4"), tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    others = {
        "vision_model.x": np.zeros(3, np.float32),
        "multi_modal_projector.linear_1.weight": np.zeros(3, np.float32),
    }
    save_file({**renamed, **others}, tmp_path / "model.safetensors")
    whole, part = (nnx.state(load_model(folder).module) for folder in (model_folder("llama4"), tmp_path))
    chex.assert_trees_all_equal(whole, part)

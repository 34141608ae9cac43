"""ModelConfig: what each form of config.json means, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING, ModelConfig
from kvjax.models.configs.rope import RopeConfig
from tests.models.configs import gemma3_dict, llama_dict, qwen3_vl_dict
from tests.models.golden_models import TINY_MODELS, model_folder

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_importing_the_config_loads_no_jax() -> None:
    code = "import sys, kvjax.models.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", TINY_MODELS)
def test_configs_that_transformers_5_wrote_are_read(name: str) -> None:
    config = ModelConfig.from_folder(model_folder(name))
    assert config.architecture.lower().startswith(name)
    assert config.eos_token_ids == ()
    assert hash(config) == hash(ModelConfig.from_folder(model_folder(name)))


def test_older_and_newer_rope_keys_mean_the_same() -> None:
    older = llama_dict(rope_theta=500_000.0, rope_scaling=LLAMA3_SCALING, torch_dtype="bfloat16")
    newer = llama_dict(rope_parameters={"rope_theta": 500_000.0, **LLAMA3_SCALING}, dtype="bfloat16")
    assert ModelConfig.from_dict(older) == ModelConfig.from_dict(newer)
    assert ModelConfig.from_dict(older).rope == RopeConfig(
        theta=500_000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_len=8192,
    )


def test_dynamic_scaling_runs_for_as_long_as_its_factor_stretches() -> None:
    """Its `max_position_embeddings` are pretraining's; the keys of a cache are rotated for the longest sequence."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = ModelConfig.from_dict(llama_dict(rope_scaling=scaling))
    assert (config.max_model_len, config.rope.original_max_len) == (512, 128)
    assert ModelConfig.from_dict(llama_dict(rope_scaling={"rope_type": "linear", "factor": 4.0})).max_model_len == 128


def test_older_and_newer_gemma_rope_keys_mean_the_same() -> None:
    newer = gemma3_dict(
        rope_scaling=...,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    config = ModelConfig.from_dict(newer)
    assert config == ModelConfig.from_dict(gemma3_dict())
    assert config.rope == RopeConfig(theta=1_000_000.0, rope_type="linear", factor=8.0)
    assert config.rope_local == RopeConfig(theta=10_000.0)


def test_keys_that_files_on_the_hub_leave_out_are_those_of_transformers() -> None:
    config = ModelConfig.from_dict(gemma3_dict(head_dim=..., sliding_window_pattern=..., torch_dtype=...))
    assert (config.head_dim, config.num_q_heads, config.num_kv_heads) == (256, 8, 4)
    assert (config.vocab_size, config.max_model_len, config.sm_scale) == (262_208, 131_072, 256**-0.5)
    assert config.layer_types.index(FULL) == 5
    assert config.eos_token_ids == (1,)
    llama = ModelConfig.from_dict(llama_dict(num_key_value_heads=...))
    assert (llama.head_dim, llama.num_kv_heads, llama.rope.theta) == (8, 4, 10_000.0)


def test_null_end_tokens_are_none_and_lists_are_kept() -> None:
    assert ModelConfig.from_dict(gemma3_dict(eos_token_id=None)).eos_token_ids == ()
    assert ModelConfig.from_dict(llama_dict(eos_token_id=[3, 4])).eos_token_ids == (3, 4)
    assert ModelConfig.from_dict(llama_dict(eos_token_id=3)).eos_token_ids == (3,)


def test_every_layer_has_the_cache_of_its_type() -> None:
    config = ModelConfig.from_dict(gemma3_dict(num_key_value_heads=2))
    specs = config.kv_cache_specs(block_size=16)
    assert list(specs) == [f"layers.{i}" for i in range(7)]
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16"}
    for layer, spec in enumerate(specs.values()):
        if (layer + 1) % 3:
            assert spec == SlidingWindowSpec(**common, sliding_window=8)
        else:
            assert spec == FullAttentionSpec(**common)
    assert config.kv_cache_specs(8, "float8_e4m3fn")["layers.2"] == FullAttentionSpec(
        block_size=8, num_kv_heads=2, head_size=16, dtype="float8_e4m3fn"
    )


def test_qwen3_slides_from_max_window_layers_on_if_told_to() -> None:
    keys = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 16, "max_window_layers": 1}
    assert ModelConfig.from_dict(llama_dict(**keys, use_sliding_window=True)).layer_types == (FULL, SLIDING)
    off = ModelConfig.from_dict(llama_dict(**keys, use_sliding_window=False))
    assert (off.layer_types, off.sliding_window) == ((FULL, FULL), None)


def test_multimodal_configs_are_read_for_their_text_part() -> None:
    config = ModelConfig.from_dict(qwen3_vl_dict())
    assert (config.experts.num_experts, config.rope.mrope_section, config.rope.theta) == (16, (24, 20, 20), 5e6)
    assert config.rope.mrope_interleaved
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": gemma3_dict(architectures=...),
        "vision_config": {},
        "mm_tokens_per_image": 256,
        "torch_dtype": "float16",
        "eos_token_id": [1, 106],
    }
    config = ModelConfig.from_dict(gemma)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))  # the text part's own word comes first
    assert config.layer_types == ModelConfig.from_dict(gemma3_dict()).layer_types


def test_end_tokens_of_the_generation_config_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_dict(eos_token_id=3)))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (llama_dict(rope_thata=1.0, hiden=2), "unknown keys hiden, rope_thata"),
        (
            llama_dict(architectures=["MambaForCausalLM"]),
            "LlamaForCausalLM, .*Qwen3ForCausalLM.*got .'MambaForCausalLM'",
        ),
        (llama_dict(architectures=...), "expected one of the architectures .* got None"),
        (llama_dict(hidden_size=...), "expected the key 'hidden_size', got none"),
        (llama_dict(num_hidden_layers=0), "'num_hidden_layers' to be a positive integer, got 0"),
        (llama_dict(num_hidden_layers=True), "'num_hidden_layers' to be a positive integer, got True"),
        (llama_dict(rms_norm_eps="small"), "'rms_norm_eps' to be a positive number, got 'small'"),
        (llama_dict(mlp_bias=1), "'mlp_bias' to be true or false, got 1"),
        (llama_dict(hidden_act="relu"), "'hidden_act' among silu, gelu, gelu_pytorch_tanh, relu2, got 'relu'"),
        (llama_dict(dtype="int8"), "'dtype' among float32, bfloat16, float16, got 'int8'"),
        (llama_dict(num_key_value_heads=3), "num_attention_heads to be a multiple .* got 4 and 3"),
        (
            llama_dict(architectures=["Qwen3ForCausalLM"], use_sliding_window=True, sliding_window="long"),
            "'sliding_window' to be a positive integer, got 'long'",
        ),
        (llama_dict(rope_scaling={"rope_type": "ntk"}), "'rope_type' among default, linear, .*longrope, .*got 'ntk'"),
        (
            llama_dict(
                architectures=["Phi3ForCausalLM"],
                rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]},
            ),
            "expected 4 numbers in short_factor and long_factor, got 1 and 2",
        ),
        (llama_dict(rope_scaling="linear"), "'rope_scaling' to be an object, got 'linear'"),
        (llama_dict(rope_scaling={"type": "linear"}), "rope_parameters: expected the key 'factor'"),
        (llama_dict(rope_scaling={"type": "default", "x": 1}), "rope_parameters: unknown keys x"),
        (gemma3_dict(layer_types=["full_attention"]), "expected 7 layer_types, got 1"),
        (gemma3_dict(layer_types=["chunked"] * 7), "layer_types among .* got chunked"),
        (gemma3_dict(attn_logit_softcapping=50.0), "'attn_logit_softcapping' to be null or false, got 50.0: transf"),
        (gemma3_dict(use_bidirectional_attention=True), "'use_bidirectional_attention' to be null or false, got True"),
        (
            llama_dict(architectures=["Qwen3ForCausalLM"], layer_types=[SLIDING, FULL]),
            "expected a sliding_window, since layer_types has sliding_attention layers",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "expected the key 'text_config', got none"),
        (qwen3_vl_dict(depth=3), "text_config: unknown keys depth"),
        (qwen3_vl_dict() | {"surprise": 1}, "config: unknown keys surprise"),
    ],
)
def test_a_bad_config_is_refused_by_name(data: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ModelConfig.from_dict(data)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a Hugging Face model folder with config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: expected JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object, got list"):
        ModelConfig.from_folder(tmp_path)

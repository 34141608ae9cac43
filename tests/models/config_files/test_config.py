"""ModelConfig: what each form of config.json means, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvjax.configs import config_root, load_model_config
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


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 128),
        ({"rope_type": "longrope", "factor": 4.0, **LONG_ROPE}, 128),
    ],
)
def test_a_model_runs_for_as_long_as_its_rotary_scaling_stretches(scaling: dict[str, Any], longest: int) -> None:
    """As in vLLM: `factor` times pretraining's length, unless `max_position_embeddings`, here 128, is that product."""
    for keys in ({"rope_scaling": scaling}, {"rope_parameters": scaling | {"rope_theta": 1e4}}):
        assert ModelConfig.from_dict(llama_dict(**keys)).max_model_len == longest


@pytest.mark.parametrize(
    ("name", "longest"),
    [("qwen2.5-7b", 131_072), ("qwen3-8b", 131_072), ("qwen3-235b-a22b", 131_072), ("mistral-7b", 131_072)],
)
def test_qwens_own_recipe_for_long_texts_is_read(name: str, longest: int) -> None:
    data = json.loads((config_root() / "models" / f"{name}.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert ModelConfig.from_dict(data | {"rope_scaling": yarn}).max_model_len == longest
    assert ModelConfig.from_dict(data | {"rope_scaling": yarn}).for_length(100).max_model_len == 100


def test_gemma_3_gives_the_length_that_its_scaling_makes() -> None:
    """131,072 tokens with a linear factor of 8, as vLLM takes it too."""
    assert load_model_config("gemma-3-27b").max_model_len == 131_072


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
    assert config.rope == RopeConfig(theta=1_000_000.0, rope_type="linear", factor=8.0, original_max_len=131_072)
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
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": gemma3_dict(architectures=...),
        "vision_config": {},
        "mm_tokens_per_image": 256,
        "torch_dtype": "float16",
        "eos_token_id": [1, 106],
    }
    config = ModelConfig.from_dict(gemma)
    assert (config.dtype, config.eos_token_ids) == ("float16", (1, 106))  # the outer word comes first
    assert config.layer_types == ModelConfig.from_dict(gemma3_dict()).layer_types


ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "longrope", "factor": 4.0, **LONG_ROPE},
)


@pytest.mark.parametrize("new", range(len(ROPES)))
@pytest.mark.parametrize("old", range(len(ROPES)))
def test_two_descriptions_of_rotary_embeddings_are_the_same_one_or_refused(old: int, new: int) -> None:
    """transformers takes one of them, and which one goes by the family."""
    for make in (llama_dict, gemma3_dict):
        theta = 1e6 if make is gemma3_dict else 5e5
        both = {**ROPES[new], "rope_theta": theta}
        data = make(
            rope_theta=theta,
            max_position_embeddings=128,
            head_dim=8,
            rope_scaling=ROPES[old],
            rope_parameters={FULL: both} if make is gemma3_dict else both,
        )
        if old == new:
            data_of_one = {key: value for key, value in data.items() if key != "rope_scaling"}
            assert ModelConfig.from_dict(data) == ModelConfig.from_dict(data_of_one)
        else:
            with pytest.raises(ConfigError, match=r"expected rope_scaling and rope_parameters to say the same, got \{"):
                ModelConfig.from_dict(data)


def test_end_tokens_of_the_generation_config_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_dict(eos_token_id=3)))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 6)
    for value, expected in ((7, (7,)), (0, (0,)), ([], ()), (None, (3,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    "value", ["2", "</s>", [None], [2, None], ["2"], [2, "3"], 2.0, [2.5], -1, [2, -1], True, {}, [[2]]]
)
def test_end_tokens_that_are_none_are_refused_by_the_load(tmp_path: Path, value: object) -> None:
    """In both files; a step would compare every token with them."""
    match = r"config\.json: expected 'eos_token_id' as a token id >= 0, a list of them, or null, got"
    (tmp_path / "config.json").write_text(json.dumps(llama_dict(eos_token_id=3)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match="generation_" + match):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama_dict(eos_token_id=value)))
    with pytest.raises(ConfigError, match="/" + match):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (llama_dict(rope_thata=1.0, hiden=2), "unknown keys hiden, rope_thata"),
        (
            llama_dict(architectures=["MambaForCausalLM"]),
            "LlamaForCausalLM, .*Qwen3ForCausalLM.*got .'MambaForCausalLM'",
        ),
        (llama_dict(architectures=..., model_type=...), r"expected one of the architectures .* got \[\]"),
        (llama_dict(architectures=None, model_type="bert"), r"expected one of the architectures .* got \[\]"),
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
        (gemma3_dict(layer_types=["full_attention"]), r"expected 7 layer_types \(num_hidden_layers\), got 1"),
        (gemma3_dict(layer_types=["chunked"] * 7), "layer_types among .* got chunked"),
        (gemma3_dict(attn_logit_softcapping=50.0), "'attn_logit_softcapping' to be null or false, got 50.0: transf"),
        (gemma3_dict(use_bidirectional_attention=True), "'use_bidirectional_attention' to be null or false, got True"),
        (
            llama_dict(architectures=["Qwen3ForCausalLM"], layer_types=[SLIDING, FULL]),
            "expected a sliding_window, since layer_types has sliding_attention layers",
        ),
        (
            llama_dict(rope_theta=1e4, rope_parameters={"rope_theta": 5e5}),
            "expected one 'rope_theta', got 500000.0 and beside the object 10000.0",
        ),
        (
            gemma3_dict(rope_scaling=..., rope_local_base_freq=1e4, rope_parameters={SLIDING: {"rope_theta": 5e3}}),
            "expected one 'rope_theta', got 5000.0 and beside the object 10000.0",
        ),
        (llama_dict(partial_rotary_factor=0.5), "'partial_rotary_factor' to be 1, as transformers takes it, got 0.5"),
        (
            llama_dict(rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}),
            "'original_max_position_embeddings' to be max_position_embeddings, 128, .*got 64",
        ),
        (
            llama_dict(
                architectures=["Phi3ForCausalLM"],
                rope_scaling={"type": "longrope", **LONG_ROPE},
                original_max_position_embeddings=32,
            ),
            "expected one 'original_max_position_embeddings', got 64 and beside the object 32",
        ),
        (
            gemma3_dict(rope_scaling={"rope_type": "yarn", "factor": 8.0, "truncate": False}),
            "'truncate' to be true, which transformers reads only of a single one",
        ),
        (
            gemma3_dict(rope_scaling={"type": "linear", "factor": 8.0}),
            "expected 'rope_type' in rope_scaling, since 'type'",
        ),
        (
            llama_dict(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 8.0}),
            "expected one 'rope_type', got 'dynamic' and as 'type' 'linear'",
        ),
        (gemma3_dict(rope_scaling=..., rope_parameters={"factor": 8.0}), "rope_parameters: unknown keys factor"),
        (
            qwen3_vl_dict(rope_parameters={"mrope_interleaved": False}, rope_scaling=...),
            "'mrope_interleaved' to be true, got false: transformers computes with nothing else",
        ),
        (qwen3_vl_dict(norm_topk_prob=False), "'norm_topk_prob' to be true, got false: transformers computes with"),
        (
            llama_dict(architectures=["MistralForCausalLM"], layer_types=[SLIDING, FULL]),
            "layer_types among sliding_attention, got full_attention",
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


def test_a_name_of_the_hub_says_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fetch = "fetch it first: hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B$"
    with pytest.raises(ConfigError, match=fetch):
        ModelConfig.from_folder("meta-llama/Llama-3.2-1B")
    for folder in (tmp_path, tmp_path / "a/b", "a/b/c"):
        with pytest.raises(ConfigError, match=r"found no .*config\.json$"):
            ModelConfig.from_folder(folder)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json is a file: give the folder that it is in$"):
        ModelConfig.from_folder("config.json")


def test_keys_that_transformers_writes_or_ignores_are_read() -> None:
    """SmolLM2's file has two that its converter wrote; transformers writes `mamba_proj_bias` and does not read it."""
    plain = ModelConfig.from_dict(llama_dict())
    smol = {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "rope_interleaved": False}
    assert ModelConfig.from_dict(llama_dict(**smol)) == plain

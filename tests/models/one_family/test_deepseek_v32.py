"""What is peculiar to DeepSeek V3.2, GLM 5 and Mistral Large 4: an indexer beside latents, layers that share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.errors import ConfigError
from kvjax.models import LoadedModel, ModelConfig, load_model
from tests.device.dense_cache import DenseCache
from tests.models.golden_models import goldens_of, model_folder


def golden_config(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_folder(name) / "config.json").read_text())
    return config | changes


def parsed(name: str, **changes: Any) -> Any:
    return ModelConfig.from_dict(golden_config(name, **changes), where="here")


def hidden_of(model: LoadedModel, prompt: np.ndarray) -> np.ndarray:
    """float32[num_tokens, hidden] of a whole prompt over dense attention."""
    tokens = jnp.asarray(prompt)
    return np.asarray(model.module(tokens, jnp.arange(len(prompt), dtype=jnp.int32), DenseCache()))


def test_texts_up_to_what_is_picked_have_plain_latent_attention(tmp_path: Path) -> None:
    """The same weights as DeepSeek V3, without the indexer, give the same states; longer texts differ."""
    folder = tmp_path / "plain"
    shutil.copytree(model_folder("deepseek_v32"), folder)
    config = golden_config("deepseek_v32", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    left_out = ("index_", "layer_types", "mlp_layer_types", "mlp_bias")
    config = {key: value for key, value in config.items() if not key.startswith(left_out)}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if ".indexer." not in name}, folder / "model.safetensors")
    plain, picking = load_model(folder, "float32"), load_model(model_folder("deepseek_v32"), "float32")
    prompt = goldens_of("deepseek_v32")[2].prompt
    num_picked = parsed("deepseek_v32").attention.indexer.topk
    states, expected = hidden_of(picking, prompt), hidden_of(plain, prompt)
    np.testing.assert_allclose(states[:num_picked], expected[:num_picked], atol=1e-5, rtol=0)
    assert np.abs(states[num_picked:] - expected[num_picked:]).max() > 0.01


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0"}


def test_an_indexer_of_fp8_is_read_as_released_files_have_it(tmp_path: Path) -> None:
    """Weights of its projections in blocks of 8 with a scale each, those of its heads' weights as they are."""
    folder = tmp_path / "quantised"
    shutil.copytree(model_folder("deepseek_v32"), folder)
    config = golden_config("deepseek_v32", quantization_config=FP8 | {"weight_block_size": [8, 8]})
    (folder / "config.json").write_text(json.dumps(config))
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in ("wq_b", "wk"):
        weight = f"model.layers.1.self_attn.indexer.{name}.weight"
        rows, columns = tensors[weight].shape
        values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        scales = np.full((-(-rows // 8), -(-columns // 8)), 0.25, np.float32)
        tensors |= {weight: values, f"{weight}_scale_inv": scales}
        expected[name] = values.astype(np.float32) * 0.25
    save_file(tensors, folder / "model.safetensors")
    indexer: Any = load_model(folder, "float32").module.layers[1].self_attn.indexer
    for name, weight in expected.items():
        np.testing.assert_array_equal(getattr(indexer, name).kernel[...], weight.T)


def test_keys_have_a_cache_beside_the_latents_of_layers_with_an_indexer() -> None:
    """Of fp8 in bytes with a scale of four."""
    config = parsed("glm_moe_dsa")
    specs = config.kv_cache_specs(8, "bfloat16")
    assert list(specs) == ["layers.0", "layers.1", "layers.2", "layers.0.indexer", "layers.2.indexer"]
    assert (specs["layers.1"].head_size, specs["layers.2.indexer"].head_size) == (32, 12)
    assert len({spec.table_key for spec in specs.values()}) == 1
    short = config.kv_cache_specs(8, "float8_e4m3fn")["layers.0.indexer"]
    assert (short.head_size, short.dtype) == (16, "int8")
    assert config.cache_words == "a latent of 32, an indexer's key of 12 in 2 layers"
    assert parsed("deepseek_v32").cache_words == "a latent of 32, an indexer's key of 12"


def test_latents_are_read_from_another_layer_and_have_no_rotated_part_where_nothing_is_rotated() -> None:
    """Layer 2 of Mistral Large 4 reads those of layer 0, layer 3 has no rotation."""
    config = parsed("mistral_large4")
    specs = config.kv_cache_specs(8, "float32")
    sizes = {name: spec.head_size for name, spec in specs.items()}
    keys = dict.fromkeys(("layers.0.indexer", "layers.2.indexer", "layers.3.indexer"), 12)
    assert sizes == {"layers.0": 16 + 8, "layers.1": 16 + 8, "layers.3": 16} | keys
    assert config.shared_layers == {"layers.2": "layers.0"}
    assert (config.attention_of(3).key_dim, config.attention_of(3).rope) == (config.attention.key_dim, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layers": [0, 1, 1, 3]}, None),
        ({"kv_source_layers": [0, 0, 0, 0]}, r"kv_source_layers\[3\] to be 3, got 0"),
        ({"kv_source_layers": [0, 1, 0, 1]}, r"kv_source_layers\[2\] to be 2 or 1, the last layer .* read, got 0"),
        ({"kv_source_layers": [0, 0, 1, 3]}, r"kv_source_layers\[2\] to be 2 or 0, the last layer .* read, got 1"),
        ({"kv_source_layers": [0, 1]}, r"kv_source_layers of 4 layers, got \[0, 1\]"),
        ({"no_rope_layers": [1, 1, 2, 0]}, r"no_rope_layers of 0 and 1 for 4 layers, got \[1, 1, 2, 0\]"),
        ({"q_lora_rank": 12}, "'q_lora_rank' to be null or false, got 12: Mistral Large 4 has none in transformers"),
    ],
)
def test_layers_of_mistral_share_as_transformers_does_or_are_refused(
    changes: dict[str, Any], message: str | None
) -> None:
    """It reads the last latents of the same rotation that any layer reads, whatever the file says."""
    text = golden_config("mistral_large4")["text_config"]
    changes = {"text_config": text | {"no_rope_layers": [1, 1, 1, 0]} | changes}
    if message is None:
        assert parsed("mistral_large4", **changes).shared_layers == {"layers.2": "layers.1"}
        return
    with pytest.raises(ConfigError, match=message):
        parsed("mistral_large4", **changes)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"index_topk_pattern": "FSSF"}, (0, 3)),
        ({"index_topk_pattern": ["full", "full", "shared", "shared"]}, (0, 1)),
        ({}, (0, 1, 2, 3)),
        ({"index_topk_freq": 2}, (0, 1, 3)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (0, 3)),
        ({"indexer_types": ["full", "shared", "shared", "shared"], "index_topk_pattern": "FFFF"}, (0,)),
    ],
)
def test_layers_with_an_indexer_are_told_in_three_ways(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    """Names go before letters, letters before a count."""
    changes = {"indexer_types": None, "num_hidden_layers": 4, "layer_types": None, "mlp_layer_types": None} | changes
    assert parsed("glm_moe_dsa", **changes).indexed_layers == layers


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared", "full", "full"]},
            r"indexer_types of full and shared for each of 3 layers, the first full, got \['shared'",
        ),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 2}, "for each of 3 layers, the first full, got"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "expected 'indexer_rope_interleave' to be true, got false"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "'indexer_rope_interleave' to be false, got true"),
        ("deepseek_v32", {"rope_interleave": False}, "expected 'rope_interleave' to be true, got false"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim of at least the 8 numbers that are rotated .* got 4"),
        (
            "deepseek_v32",
            {"q_lora_rank": None},
            "expected a 'q_lora_rank', whose numbers the indexer projects, got null",
        ),
        (
            "deepseek_v32",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            r"mlp_layer_types of 3 layers, dense ones and then sparse ones, got \['sparse', 'dense', 'sparse'\]",
        ),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)
def test_configs_that_mean_something_else_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(name, **changes)

"""Gemma 4 text: what its config.json may leave out, heads of full layers, rotary embeddings of a part of a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.errors import ConfigError
from kvjax.models import DenseAttention, ModelConfig, build_model, load_model
from kvjax.models.config import FULL, SLIDING
from kvjax.models.layers.rotary import inverse_frequencies
from kvjax.models.save import save_weights
from tests.models.configs import llama_dict

TWO_OF_EACH = [SLIDING, FULL, SLIDING, FULL]


def gemma4_dict(**changes: Any) -> dict[str, Any]:
    """A small Gemma 4."""
    base = {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4}
    sizes = {"vocab_size_per_layer_input": 64, "max_position_embeddings": ..., "layer_types": TWO_OF_EACH}
    return llama_dict(architectures=["Gemma4ForCausalLM"], **base | sizes | changes)


def test_keys_that_files_leave_out_are_those_of_transformers() -> None:
    without = dict.fromkeys(("head_dim", "global_head_dim", "layer_types", "hidden_size_per_layer_input"), ...)
    config: Any = ModelConfig.from_dict(gemma4_dict(**without | {"num_hidden_layers": 8}))
    assert config.layer_types == (*[SLIDING] * 5, FULL, SLIDING, FULL)  # the last layer is always full
    assert (config.head_dim, config.full_heads, config.sliding_window) == (256, (2, 512), 512)
    assert (config.per_layer_size, config.max_model_len, config.sm_scale) == (256, 131_072, 1.0)
    rope, local = config.rope, config.rope_local
    assert (rope.rope_type, rope.theta, rope.partial_rotary_factor) == ("proportional", 1_000_000.0, 0.25)
    assert (local.rope_type, local.theta, local.partial_rotary_factor) == ("default", 10_000.0, 1.0)
    assert (config.experts, config.num_shared_layers, config.v_is_k) == (None, 0, False)


def test_caches_have_the_heads_of_their_layers() -> None:
    config = ModelConfig.from_dict(gemma4_dict(attention_k_eq_v=True, num_global_key_value_heads=1))
    common = {"block_size": 16, "dtype": "float32"}
    window = SlidingWindowSpec(**common, num_kv_heads=2, head_size=8, sliding_window=512)
    full = FullAttentionSpec(**common, num_kv_heads=1, head_size=16)
    assert list(config.kv_cache_specs().values()) == [window, full] * 2
    assert config.cache_words == "2 KV heads of 8, 1 of 16 in full layers"
    assert config.splits_cache(2)  # the one head of full layers lies on both devices
    assert not config.splits_cache(3)
    sharing = ModelConfig.from_dict(gemma4_dict(num_kv_shared_layers=2))
    assert sharing.shared_layers == {"layers.2": "layers.0", "layers.3": "layers.1"}
    assert sharing.splits_cache(2)


def test_global_kv_heads_are_for_layers_whose_values_are_their_keys() -> None:
    """As transformers reads the key."""
    config: Any = ModelConfig.from_dict(gemma4_dict(num_global_key_value_heads=1))
    assert config.full_heads == (2, 16)


def test_both_ways_to_name_the_heads_of_full_layers_mean_the_same() -> None:
    keys = {"attention_k_eq_v": True}
    by_key = ModelConfig.from_dict(gemma4_dict(**keys, num_global_key_value_heads=1))
    heads = {"head_dim": 16, "num_key_value_heads": 1}
    by_layer = gemma4_dict(**keys, global_head_dim=..., per_layer_config={"1": heads, "3": heads})
    assert ModelConfig.from_dict(by_layer) == by_key


@pytest.mark.parametrize("names", [("1", "3"), ("01", "03"), ("001", "3")])
@pytest.mark.parametrize("says_all", [False, True])
def test_a_layer_has_what_is_said_of_its_number_however_that_is_written(names: tuple[str, str], says_all: bool) -> None:
    """transformers pads numbers with zeros, and may say of every layer what it has."""
    others = {f"{i:02}": {"head_dim": 8, "num_key_value_heads": 2} for i in (0, 2)} if says_all else {}
    data = gemma4_dict(global_head_dim=..., per_layer_config={key: {"head_dim": 16} for key in names} | others)
    assert ModelConfig.from_dict(data) == ModelConfig.from_dict(gemma4_dict(global_head_dim=16))


def test_full_layers_without_a_word_are_as_the_others() -> None:
    config: Any = ModelConfig.from_dict(gemma4_dict(per_layer_config={}))
    assert config.full_heads == (config.num_kv_heads, config.head_dim)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'rope_scaling' to be null or false, got .*Gemma 4"),
        ({"per_layer_config": {"1": 16}}, "per_layer_config: expected '1' to be an object, got 16"),
        ({"per_layer_config": {"9": {"head_dim": 16}}}, "per_layer_config: expected the same of each full layer and"),
        ({"per_layer_config": {"last": {"head_dim": 16}}}, "invalid literal for int"),
        ({"use_bidirectional_attention": "all"}, "to be null or 'vision', got 'all': a decoder with a cache is causal"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config: expected the same of each full layer and"),
        (
            {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 32}}},
            "per_layer_config: expected the same of each full layer and",
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 16, "x": 1}, "3": {"head_dim": 16, "x": 1}}},
            "per_layer_config: unknown keys x",
        ),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "to be a multiple of .* got 4 and 3"),
        ({"enable_moe_block": True}, "expected the key 'num_experts', got none"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers to leave a layer of each type with pages, got 3"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ModelConfig.from_dict(gemma4_dict(**changes))


def test_proportional_rope_turns_the_first_pairs_as_fast_as_if_all_turned() -> None:
    """A quarter of 16 dimensions: 2 of the 8 pairs i and i + 8, with the frequencies of a head of 16."""
    rope = ModelConfig.from_dict(gemma4_dict()).rope
    expected = [1.0, 1_000_000.0 ** -(2 / 16), 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(inverse_frequencies(rope, 16, 128), expected, rtol=1e-6)


@pytest.mark.parametrize("changes", [{"hidden_size_per_layer_input": 0}, {"hidden_size_per_layer_input": None}])
def test_models_without_inputs_of_their_layers_run(changes: dict[str, Any]) -> None:
    module = build_model(ModelConfig.from_dict(gemma4_dict(**changes)), rngs=nnx.Rngs(0))
    assert not any("per_layer" in "".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module)))
    logits = jax.jit(lambda tokens: module.logits(module(tokens, jnp.arange(5), DenseAttention())))(jnp.arange(5))
    chex.assert_tree_all_finite(logits)


def test_a_multimodal_checkpoint_is_read_for_its_text_part(tmp_path: Path) -> None:
    text = gemma4_dict(num_kv_shared_layers=2, use_double_wide_mlp=True)
    module = build_model(ModelConfig.from_dict(text), rngs=nnx.Rngs(0))
    assert module.layers[3].feed_forward.mlp.up_proj.out_features == 2 * 48
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "eoa_token_index": 5}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_weights(module, tmp_path, "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    unused = ["model.language_model.layers.3.self_attn.k_proj.weight", "model.embed_vision.x", "model.vision_tower.x"]
    save_file(renamed | dict.fromkeys(unused, np.zeros(3, np.float32)), tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(nnx.state(load_model(tmp_path, "float32").module), nnx.state(module))

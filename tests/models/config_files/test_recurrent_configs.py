"""Configs of families with recurrent layers: which layers are which, what is refused, what their states are."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.core import MambaSpec
from kvjax.errors import ConfigError
from kvjax.models import ModelConfig
from kvjax.models.configs.states import StateShapes
from tests.models.config_files.recurrent_configs import config_dict


def parse(name: str, **changes: Any) -> Any:
    """The config of a small model, changed."""
    return ModelConfig.from_dict(config_dict(name, **changes), where="here")


def kinds(name: str, **changes: Any) -> list[str]:
    """The kind of each layer's cache."""
    return [spec.kind for spec in parse(name, **changes).kv_cache_specs().values()]


def test_layers_of_jamba_attend_and_have_experts_once_in_a_period() -> None:
    assert kinds("jamba", num_hidden_layers=5) == ["mamba", "full_attention", "mamba", "mamba", "full_attention"]
    assert parse("jamba", num_hidden_layers=5).expert_layers == (False, True, False, True, False)
    assert not any(parse("jamba", num_experts=1, num_experts_per_tok=1).expert_layers)
    defaults = parse("jamba", num_hidden_layers=16, attn_layer_period=..., attn_layer_offset=...)
    assert [i for i, kind in enumerate(defaults.layer_types) if kind == "full_attention"] == [4, 12]


def test_layers_of_granite_have_the_names_of_older_and_newer_files() -> None:
    for names in (["mamba", "attention"], ["linear_attention", "full_attention"]):
        assert kinds("granite_moe_hybrid", num_hidden_layers=2, layer_types=names) == ["mamba", "full_attention"]
    assert kinds("granite_moe_hybrid", layer_types=...) == ["mamba"] * 3


def test_granite_has_rotary_embeddings_where_it_says_rope_and_may_have_no_experts() -> None:
    ropes = [parse("granite_moe_hybrid", position_embedding_type=name).rope for name in ("rope", "nope", None)]
    assert [rope is None for rope in ropes] == [False, True, True]
    assert parse("granite_moe_hybrid", num_local_experts=0, num_experts_per_tok=0).experts is None


def test_limits_of_time_steps_may_be_infinite() -> None:
    """transformers 5 writes infinity as an object."""
    for infinity in (float("inf"), {"__float__": "Infinity"}):
        limits = parse("granite_moe_hybrid", time_step_limit=[0.5, infinity]).mamba.dt_limit
        assert limits == (0.5, float("inf"))


def test_a_rank_of_auto_is_a_sixteenth_of_the_hidden_size() -> None:
    ranks = [
        parse("jamba", **changes).mamba.dt_rank for changes in ({}, {"mamba_dt_rank": "auto"}, {"mamba_dt_rank": 5})
    ]
    assert ranks == [2, 2, 5]


def test_every_fourth_layer_of_qwen3_next_attends_unless_it_says_otherwise() -> None:
    assert kinds("qwen3_next") == ["mamba"] * 3 + ["full_attention"]
    assert kinds("qwen3_5", full_attention_interval=2) == ["mamba", "full_attention"] * 2
    types = ["full_attention", *["linear_attention"] * 3]
    assert kinds("qwen3_5", layer_types=types) == ["full_attention", "mamba", "mamba", "mamba"]


def test_experts_of_qwen3_next_are_in_some_layers_of_qwen3_5_in_all_or_none() -> None:
    config = parse("qwen3_next", decoder_sparse_step=2, mlp_only_layers=[3])
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    assert not parse("qwen3_5").has_experts(0)
    assert parse("qwen3_5", architectures=["Qwen3_5MoeForCausalLM"], intermediate_size=...).has_experts(0)


def test_a_quarter_of_a_head_is_rotated_unless_the_file_says_otherwise() -> None:
    ropes = [parse("qwen3_next", **changes).rope for changes in ({}, {"partial_rotary_factor": 0.5})]
    assert [rope.partial_rotary_factor for rope in ropes] == [0.25, 0.5]


def test_the_state_of_the_rule_may_have_a_dtype_of_its_own() -> None:
    """`mamba_ssm_dtype`, which vLLM follows; else all states are in the model's."""
    for asked, dtype in ((None, "bfloat16"), ("float32", "float32")):
        config = parse("qwen3_5", dtype="bfloat16", mamba_ssm_dtype=asked)
        assert config.kv_cache_specs()["layers.0"].state_dtypes == ("bfloat16", dtype)


def test_layers_of_kimi_linear_are_counted_from_1_on_the_hub() -> None:
    assert kinds("kimi_linear") == ["mamba"] * 3 + ["mla_attention"]
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    newer = {"linear_attn_config": ..., "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": types}
    assert kinds("kimi_linear", **newer) == ["mla_attention", "mamba", "mamba", "mla_attention"]
    assert kinds("kimi_linear", num_hidden_layers=9, linear_attn_config=...).index("mla_attention") == 4


def test_keys_of_kimi_linear_have_the_names_of_the_hub_or_of_transformers() -> None:
    config = parse("kimi_linear")
    assert (config.max_model_len, config.experts.num_experts, config.experts.top_k) == (128, 8, 2)
    assert (config.first_expert_layer, config.experts.scale, config.attention.rope) == (1, 2.446, None)
    types = ["dense", "dense", "sparse", "sparse"]
    assert parse("kimi_linear", first_k_dense_replace=..., mlp_layer_types=types).first_expert_layer == 2


def test_the_matrices_of_kimi_delta_attention_are_in_float32() -> None:
    """Three convolutions of 4 heads of 8 over 3 tokens in the model's dtype."""
    spec = parse("kimi_linear", dtype="bfloat16").kv_cache_specs(8)["layers.0"]
    assert spec.state_shapes == ((32, 3), (32, 3), (32, 3), (4, 8, 8))
    assert spec.state_dtypes == ("bfloat16", "bfloat16", "bfloat16", "float32")
    assert spec.state_bytes == 3 * 32 * 3 * 2 + 4 * 8 * 8 * 4
    assert spec.block_size == -(-spec.state_bytes // (2 * (16 + 64) * 8)) * 8


def test_layers_of_nemotron_h_without_a_cache_have_none() -> None:
    """M: Mamba, *: attention, -: a dense part, E: experts; newer files name them."""
    config = parse("nemotron_h")
    assert {name: spec.kind for name, spec in config.kv_cache_specs().items()} == {
        "layers.0": "mamba",
        "layers.1": "full_attention",
        "layers.3": "mamba",
    }
    assert config.expert_layers == (False, False, False, False, True)
    for names in (
        ["mamba", "attention", "mlp", "mamba", "moe"],
        ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
    ):
        assert parse("nemotron_h", hybrid_override_pattern=..., layers_block_type=names) == config


def test_nemotron_h_scans_in_float32_unless_it_says_otherwise_and_bounds_time_steps_below() -> None:
    config = parse("nemotron_h", dtype="bfloat16")
    assert config.kv_cache_specs()["layers.0"].state_dtypes == ("bfloat16", "float32")
    asked = parse("nemotron_h", dtype="bfloat16", mamba_ssm_cache_dtype="bfloat16")
    assert asked.kv_cache_specs()["layers.0"].state_dtypes == ("bfloat16", "bfloat16")
    assert (config.mamba.dt_limit, config.head_dim) == ((0.001, float("inf")), 8)


def test_layers_of_lfm2_attend_where_layer_types_or_the_indices_of_older_files_say() -> None:
    assert kinds("lfm2") == ["mamba", "full_attention"] * 2
    assert kinds("lfm2", full_attn_idxs=...) == ["full_attention"] * 4
    assert kinds("lfm2", layer_types=["conv"] * 4) == ["mamba"] * 4
    last = ["full_attention", "mamba"]
    assert kinds("lfm3") == ["mamba", "mamba", *last, "sliding_window", "mamba", *last]


def test_the_state_of_a_short_convolution_is_its_last_inputs() -> None:
    """32 channels over 2 tokens, as much as 2 tokens of 2 heads of 8."""
    spec = parse("lfm2", dtype="bfloat16").kv_cache_specs(8)["layers.0"]
    assert (spec.state_shapes, spec.state_dtypes, spec.block_size) == (((32, 2),), ("bfloat16",), 8)
    assert parse("lfm2", conv_L_cache=5).kv_cache_specs(8)["layers.0"].state_shapes == ((32, 4),)


def test_dense_parts_of_lfm2_have_two_thirds_of_the_width_that_is_said() -> None:
    """Rounded up to a multiple of 10, unless the file says that the width is what it says."""
    widths = [
        parse("lfm2", **changes).intermediate_size
        for changes in (
            {},
            {"intermediate_size": 31},
            {"block_ffn_dim_multiplier": 1.3},
            {"block_ff_dim": 48},
            {"block_auto_adjust_ff_dim": False},
        )
    ]
    assert widths == [20, 20, 20, 40, 24]


def test_a_head_of_lfm2_is_tied_unless_either_key_says_no() -> None:
    """`tie_embedding` of released files goes before the other."""
    tied = [
        parse("lfm2", **changes).tie_word_embeddings
        for changes in ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": False, "tie_embedding": True})
    ]
    assert tied == [True, False, True]


def test_a_state_of_mamba_2_alone_is_worth_its_bytes_in_attention_of_the_models_width() -> None:
    """(64 + 2 * 2 * 6) * 3 + 8 heads * 8 * 6 numbers, 2 * 32 a token."""
    config = parse("mamba2")
    assert kinds("mamba2") == ["mamba"] * 3
    assert config.kv_cache_specs(8)["layers.2"].block_size == 16
    assert (config.max_model_len, config.cache_words) == (1_048_576, "3 layers with states")


def test_every_layer_of_falcon_h1_has_k_and_v_and_a_state() -> None:
    config = parse("falcon_h1", dtype="bfloat16")
    specs = config.kv_cache_specs(8)
    assert {name: spec.kind for name, spec in specs.items()} == {
        "layers.0": "full_attention",
        "layers.0.mamba": "mamba",
        "layers.1": "full_attention",
        "layers.1.mamba": "mamba",
    }
    assert specs["layers.1.mamba"].state_shapes == ((48 + 2 * 5, 3), (6, 8, 5))
    assert [n for n in (1, 2, 3, 4) if config.splits_cache(n)] == [1, 2]


def test_the_multiplier_of_keys_of_falcon_h1_scales_scores() -> None:
    plain, scaled = parse("falcon_h1"), parse("falcon_h1", key_multiplier=0.5)
    assert scaled.sm_scale == plain.sm_scale * 0.5


def test_olmo_hybrid_rotates_where_the_file_says_how() -> None:
    """A base of null is none; a file that says nothing has transformers' own."""
    ropes = [
        parse("olmo_hybrid", rope_parameters=given).rope
        for given in ({"rope_type": "default", "rope_theta": None}, {"rope_type": "default", "rope_theta": 5e5}, None)
    ]
    assert [rope and rope.theta for rope in ropes] == [None, 5e5, 10_000.0]


def test_delta_nets_of_olmo_hybrid_are_sized_by_the_hidden_size_unless_the_file_says_otherwise() -> None:
    assert kinds("olmo_hybrid") == ["mamba"] * 3 + ["full_attention"]
    assert kinds("olmo_hybrid", num_hidden_layers=2) == ["mamba", "full_attention"]
    delta = parse("olmo_hybrid").delta
    assert (delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim) == (4, 4, 6, 12)
    assert [parse("olmo_hybrid", linear_allow_neg_eigval=x).delta.most_written for x in (True, False)] == [2.0, 1.0]


def test_states_are_in_the_dtype_of_the_weights_whatever_that_of_k_and_v() -> None:
    spec = parse("jamba", dtype="bfloat16").kv_cache_specs(8, "float32")["layers.0"]
    assert isinstance(spec, MambaSpec)
    assert spec.state_dtypes == ("bfloat16", "bfloat16")


def test_states_split_where_all_devices_have_whole_units() -> None:
    """Heads that share inputs stay together, and every array splits by its first dimension."""
    states = StateShapes(((12, 3), (8, 4, 4)), (None, None))
    assert [n for n in range(1, 13) if states.splits(n)] == [1, 2, 4]
    assert [n for n in range(1, 13) if StateShapes(states.shapes, states.dtypes, num_units=2).splits(n)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("granite_moe_hybrid", {"mamba_n_heads": 7}, r"expected mamba_n_heads \* mamba_d_head to be 64 .*, got 7 \* 9"),
        ("granite_moe_hybrid", {"mamba_n_groups": 3}, "here: expected Mamba groups that divide 8 heads, got 3"),
        ("granite_moe_hybrid", {"time_step_limit": [1, 0]}, "'time_step_limit' to be two growing numbers >= 0, got"),
        ("granite_moe_hybrid", {"normalization_function": "layernorm"}, "'normalization_function' among rmsnorm, got"),
        ("kimi_linear", {"mla_use_nope": False}, "here: expected 'mla_use_nope' to be true, got false"),
        ("kimi_linear", {"moe_layer_freq": 2}, "here: expected 'moe_layer_freq' to be 1, got 2"),
        ("kimi_linear", {"num_hidden_layers": 5}, r"linear_attn_config: expected layers 1 to 5 once each, got \(4,\)"),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types to be dense, then sparse, got"),
        ("kimi_linear", {"n_routed_experts": 4}, "here: expected one value of 'n_routed_experts' and its other names"),
        ("nemotron_h", {"num_hidden_layers": 4}, "here: expected num_hidden_layers to be 5, .*, got 4"),
        ("nemotron_h", {"hybrid_override_pattern": "M*X-E"}, r"expected layers among .* \(letters M\*-E\), got X"),
        ("nemotron_h", {"attention_bias": True}, "'attention_bias' to be null or false, got True"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "here: expected linear_num_key_heads that divide 4 .*, got 3"),
        ("qwen3_5", {"attn_output_gate": False}, "here: expected 'attn_output_gate' to be true, got false"),
        ("qwen3_5", {"mamba_ssm_dtype": "int8"}, "here: expected 'mamba_ssm_dtype' among .*, got 'int8'"),
        ("mamba2", {"num_heads": 4}, r"expected num_heads \* head_dim to be 64 .*, got 4 \* 8"),
        ("mamba2", {"n_groups": 3}, "here: expected Mamba groups that divide 8 heads, got 3"),
        ("mamba2", {"hidden_act": "gelu"}, "here: expected 'hidden_act' among silu, got 'gelu'"),
        ("falcon_h1", {"mamba_n_heads": 7}, r"expected mamba_n_heads \* mamba_d_head to be 48 .*, got 7 \* 6"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "'ssm_multipliers' to be 5 positive numbers, got"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0]}, r"'mlp_multipliers' to be 2 positive numbers, got \[1.0, 0\]"),
        ("falcon_h1", {"ssm_in_multiplier": 0}, "'ssm_in_multiplier' to be a positive number, got 0"),
        ("olmo_hybrid", {"linear_num_key_heads": 3}, "expected linear_num_key_heads that divide 4 .*, got 3"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "here: expected 'hidden_act' among silu, got 'gelu'"),
        ("lfm2", {"conv_L_cache": 1}, "here: expected 'conv_L_cache' of at least 2, got 1"),
        ("lfm2", {"full_attn_idxs": 1}, "'full_attn_idxs' to be a list of integers >= 0, got 1"),
        ("lfm2", {"layer_types": ["conv", "mamba"] * 2}, "expected layer_types among full_attention, conv, got mamba"),
        ("lfm2", {"architectures": ["Lfm2MoeForCausalLM"]}, "here: expected the key 'layer_types', got none"),
        ("lfm3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'rope_scaling' to be null or false, got"),
        ("lfm3", {"sliding_window": 0}, "here: expected 'sliding_window' to be a positive integer, got 0"),
        ("jamba", {"sliding_window": 8}, "here: expected 'sliding_window' to be null or false, got 8"),
        ("jamba", {"attn_layer_offset": -1}, "'attn_layer_offset' to be an integer >= 0, got -1"),
        ("jamba", {"hidden_act": "gelu"}, "here: expected 'hidden_act' among silu, got 'gelu'"),
        ("jamba", {"mamba_inner_layernorms": False}, "here: expected 'mamba_inner_layernorms' to be true, got false"),
        ("jamba", {"mamba_dt_rank": "most"}, "'mamba_dt_rank' to be a positive integer, got 'most'"),
        ("jamba", {"num_experts_per_tok": 5}, r"here: expected num_experts_per_tok in \[1, 4\], got 5"),
    ],
)
def test_configs_that_cannot_be_are_refused(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(name, **changes)

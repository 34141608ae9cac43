"""Small config.json contents of families with recurrent layers."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "granite_moe_hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "num_local_experts": 4,
        "shared_intermediate_size": 12,
        "embedding_multiplier": 3,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": {  # as on the Hub
        "architectures": ["KimiLinearForCausalLM"],
        "max_position_embeddings": ...,
        "model_max_length": 128,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "kv_lora_rank": 16,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "head_dim": 8,
            "kda_layers": [1, 2, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "rope_theta": 10000.0,
        "topk_group": 1,
        "use_grouped_topk": True,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M*-ME",
        "attention_head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 4,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-5,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 4,
        "full_attn_idxs": [1, 3],
        "block_multiple_of": 10,
        "norm_eps": 1e-5,
    },
    "lfm3": {"architectures": ["Lfm3ForCausalLM"], "num_hidden_layers": 8, "head_dim": 8},
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        **dict.fromkeys(("max_position_embeddings", "num_attention_heads", "num_key_value_heads"), ...),
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 6,
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 2,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_d_state": 5,
    },
    "olmo_hybrid": {"architectures": ["OlmoHybridForCausalLM"], "num_hidden_layers": 4},
    "jamba": {
        "architectures": ["JambaForCausalLM"],
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 6,
    },
}


def config_dict(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a small model; a change to `...` removes the key."""
    return {key: value for key, value in (_COMMON | MODELS[name] | changes).items() if value is not ...}

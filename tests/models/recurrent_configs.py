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

"""Latent attention over tokens that an indexer picks: DeepSeek V3.2, and GLM 5, whose layers share picks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from scripts.goldens.family import TINY, Family, rope

PLAIN: dict[str, Any] = TINY | {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "n_group": 3,
    "topk_group": 2,
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 16,
}
ODD: dict[str, Any] = PLAIN | {
    "vocab_size": 37,
    "hidden_size": 28,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 22,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "index_n_heads": 13,
    "index_head_dim": 11,
    "index_topk": 13,
    "attention_bias": True,
}
SCALE = 8.0  # of the weights of the indexer's heads, so that scores lie apart


def yarn() -> dict[str, Any]:
    sizes = {"factor": 8.0, "beta_fast": 8.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
    return rope("yarn", **sizes, mscale=1.0, mscale_all_dim=0.8)


def spread_scores(model: torch.nn.Module) -> None:
    """Makes differences of an indexer's scores larger."""
    for name, weight in model.named_parameters():
        if name.endswith("indexer.weights_proj.weight"):
            weight.mul_(SCALE)


def families() -> dict[str, Family]:
    v32, glm = transformers.DeepseekV32Config, transformers.GlmMoeDsaConfig
    full, shared = "full", "shared"
    configs = {
        "deepseek_v32": v32(**PLAIN, rope_parameters=yarn()),
        "deepseek_v32_odd": v32(**ODD | {"first_k_dense_replace": 2}, rope_parameters=rope()),
        "glm_moe_dsa": glm(
            **PLAIN | {"n_group": 1, "topk_group": 1},
            indexer_types=[full, shared, full],
            rope_parameters=rope(rope_theta=1_000_000.0),
        ),
        "glm_moe_dsa_odd": glm(
            **ODD | {"num_hidden_layers": 4},
            indexer_types=[full, full, shared, shared],
            rope_parameters=yarn(),
        ),
    }
    return {name: Family(config=config, settle=spread_scores, logits_stride=16) for name, config in configs.items()}

"""Latent attention over tokens that an indexer picks: DeepSeek V3.2, and GLM 5, whose layers share picks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from scripts.goldens.family import TINY, Family, rope
from scripts.goldens.setting_cases import PIXTRAL

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
OF_FEW_EXPERTS: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
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


def mistral_large4(text: dict[str, Any], sources: list[int], rotated: list[int], types: list[str]) -> Family:
    left_out = ("q_lora_rank", "num_hidden_layers")
    config = transformers.MistralLarge4Config(
        text_config={
            **{key: value for key, value in text.items() if key not in left_out},
            "model_type": "mistral_large4_text",
            "num_hidden_layers": len(sources),
            "kv_source_layers": sources,
            "no_rope_layers": rotated,
            "indexer_types": types,
        },
        vision_config=PIXTRAL,
    )
    return Family(
        config=config,
        model_class=transformers.AutoModelForImageTextToText,
        final_norm="model.language_model.norm",
        settle=spread_scores,
        logits_stride=16,
    )


def families() -> dict[str, Family]:
    v32, glm = transformers.DeepseekV32Config, transformers.GlmMoeDsaConfig
    full, shared = "full", "shared"
    configs = {
        "deepseek_v32": v32(**PLAIN | {"vocab_size": 32, "hidden_size": 24}, rope_parameters=yarn()),
        "deepseek_v32_odd": v32(
            **ODD | {"vocab_size": 29, "hidden_size": 20, "first_k_dense_replace": 2}, rope_parameters=rope()
        ),
        "glm_moe_dsa": glm(
            **PLAIN | {"vocab_size": 32, "hidden_size": 24, "n_group": 1, "topk_group": 1},
            indexer_types=[full, shared, full],
            rope_parameters=rope(rope_theta=1_000_000.0),
        ),
        "glm_moe_dsa_odd": glm(
            **ODD
            | {"num_hidden_layers": 4, "hidden_size": 20, "kv_lora_rank": 18, "vocab_size": 31, "n_routed_experts": 6},
            indexer_types=[full, full, shared, shared],
            rope_parameters=yarn(),
        ),
    }
    made = {name: Family(config=config, settle=spread_scores, logits_stride=16) for name, config in configs.items()}
    yarn_of_few = rope(
        "yarn", factor=32.0, beta_fast=8.0, beta_slow=1.0, attention_factor=1.0, original_max_position_embeddings=16
    )
    return made | {
        "mistral_large4": mistral_large4(
            PLAIN | OF_FEW_EXPERTS | {"final_logit_softcapping": 20.0, "rope_parameters": yarn_of_few},
            [0, 1, 0, 3],
            [1, 1, 1, 0],
            [full, shared, full, full],
        ),
        "mistral_large4_odd": mistral_large4(
            ODD
            | OF_FEW_EXPERTS
            | {"vocab_size": 29, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "rope_parameters": rope()},
            [0, 1, 1],
            [1, 0, 0],
            [full, shared, full],
        ),
    }

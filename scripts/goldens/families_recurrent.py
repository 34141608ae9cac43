"""Hybrids of recurrent layers and attention: Mamba 1 and 2, the gated delta rule, Kimi's per-channel form of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers

from scripts.goldens.family import TINY, Family, rope

SMALL: dict[str, Any] = TINY | {"hidden_size": 32, "intermediate_size": 64}
RECURRENT, FULL = "linear_attention", "full_attention"


def remember(model: torch.nn.Module) -> None:
    """States that forget half of a token within 3 to 200 tokens, so that one of a wrong prefix shows in the logits."""
    for name, param in model.named_parameters():
        if name.endswith("A_log"):
            param.uniform_(math.log(0.05), math.log(2.0))
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            param.normal_(-2.0, 0.5)


def families() -> dict[str, Family]:
    return {
        "jamba": Family(
            config=transformers.JambaConfig(
                **SMALL | {"intermediate_size": 32},
                num_hidden_layers=6,
                attn_layer_period=3,
                attn_layer_offset=1,
                expert_layer_period=2,
                expert_layer_offset=1,
                num_experts=4,
                num_experts_per_tok=2,
                mamba_d_state=8,
                mamba_dt_rank=8,
                use_mamba_kernels=False,
            ),
            final_norm="model.final_layernorm",
            settle=remember,
        ),
        "granite_moe_hybrid": Family(
            config=transformers.GraniteMoeHybridConfig(
                **TINY | {"intermediate_size": 16},
                num_hidden_layers=4,
                layer_types=[RECURRENT, FULL] * 2,
                num_local_experts=6,
                num_experts_per_tok=2,
                shared_intermediate_size=32,
                mamba_n_heads=8,
                mamba_n_groups=2,
                mamba_d_head=16,
                mamba_d_state=16,
                mamba_chunk_size=32,
                embedding_multiplier=2.0,
                logits_scaling=1.5,
                residual_multiplier=0.5,
                attention_multiplier=0.2,
                tie_word_embeddings=True,
                rope_parameters=rope(),
            ),
            flips_final_norm=True,
            settle=remember,
        ),
        "nemotron_h": Family(
            config=transformers.NemotronHConfig(
                **SMALL,
                head_dim=16,
                hybrid_override_pattern="M*E-M*E-",
                mamba_num_heads=8,
                mamba_head_dim=8,
                n_groups=2,
                ssm_state_size=16,
                chunk_size=32,
                n_routed_experts=8,
                num_experts_per_tok=3,
                n_group=2,
                topk_group=1,
                routed_scaling_factor=2.5,
                moe_intermediate_size=24,
                moe_shared_expert_intermediate_size=32,
            ),
            final_norm="model.norm_f",
            settle=remember,
        ),
        "qwen3_next": Family(
            config=transformers.Qwen3NextConfig(
                **SMALL,
                head_dim=16,
                num_hidden_layers=4,
                layer_types=[RECURRENT, FULL] * 2,
                linear_num_key_heads=4,
                linear_num_value_heads=8,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=32,
                rope_parameters=rope(partial_rotary_factor=0.5),
            ),
            settle=remember,
        ),
        "qwen3_5": Family(
            config=transformers.Qwen3_5TextConfig(
                **SMALL,
                head_dim=16,
                num_hidden_layers=4,
                layer_types=[RECURRENT, FULL] * 2,
                linear_num_key_heads=4,
                linear_num_value_heads=8,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
            ),
            settle=remember,
        ),
        "kimi_linear": Family(
            config=transformers.KimiLinearConfig(
                **SMALL | {"num_key_value_heads": 8},
                num_hidden_layers=4,
                layer_types=[RECURRENT, FULL] * 2,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=12,
                linear_num_heads=4,
                linear_head_dim=16,
                num_local_experts=8,
                num_experts_per_tok=3,
                n_shared_experts=1,
                n_group=1,
                moe_intermediate_size=16,
            ),
            settle=remember,
            renamed=((r"block_sparse_moe(\.(?:gate|up|down)_proj)", r"mlp\1"),),  # of dense layers
        ),
    }

"""Decoders with experts: plain, behind windows with sinks in the softmax, in chunks, behind latent attention."""

from __future__ import annotations

from typing import Any

import transformers

from scripts.goldens.family import TINY, Family, rope

SMALL: dict[str, Any] = TINY | {"hidden_size": 32, "head_dim": 16, "num_experts_per_tok": 2}
INPUTS_FIRST = ("experts.gate_up_proj", "experts.down_proj")


def families() -> dict[str, Family]:
    return {
        "mixtral": Family(
            config=transformers.MixtralConfig(
                **SMALL | {"intermediate_size": 32}, num_hidden_layers=3, num_local_experts=8, rope_parameters=rope()
            )
        ),
        "qwen3_moe": Family(
            config=transformers.Qwen3MoeConfig(
                **SMALL | {"num_experts_per_tok": 3},
                num_hidden_layers=3,
                num_experts=8,
                moe_intermediate_size=32,
                norm_topk_prob=True,
                mlp_only_layers=[0],
                rope_parameters=rope(),
            )
        ),
        "gpt_oss": Family(
            config=transformers.GptOssConfig(
                **SMALL | {"intermediate_size": 32},
                num_hidden_layers=4,
                num_local_experts=8,
                sliding_window=16,
                swiglu_limit=1.5,
                rope_parameters=rope(
                    "yarn",
                    factor=8.0,
                    beta_fast=8.0,
                    beta_slow=1.0,
                    truncate=False,
                    original_max_position_embeddings=64,
                ),
            ),
            transposed=INPUTS_FIRST,
        ),
        "llama4": Family(
            config=transformers.Llama4TextConfig(
                **SMALL | {"intermediate_size": 32},
                intermediate_size_mlp=64,
                num_hidden_layers=4,
                num_local_experts=4,
                interleave_moe_layer_step=2,
                no_rope_layer_interval=2,
                attention_chunk_size=32,
                floor_scale=16,
                attn_scale=0.4,
                rope_parameters=rope(
                    "llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=64,
                ),
            ),
            transposed=INPUTS_FIRST,
        ),
        "deepseek_v2": Family(
            config=transformers.DeepseekV2Config(
                **TINY | {"hidden_size": 32, "num_key_value_heads": 8},
                num_hidden_layers=3,
                q_lora_rank=None,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=12,
                first_k_dense_replace=1,
                n_routed_experts=16,
                n_shared_experts=2,
                num_experts_per_tok=3,
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
                moe_intermediate_size=16,
                routed_scaling_factor=4.0,
                rope_parameters=rope(
                    "yarn",
                    factor=8.0,
                    beta_fast=8.0,
                    beta_slow=1.0,
                    mscale=0.707,
                    mscale_all_dim=0.707,
                    original_max_position_embeddings=64,
                ),
            )
        ),
        "deepseek_v3": Family(
            config=transformers.DeepseekV3Config(
                **TINY | {"hidden_size": 32, "num_key_value_heads": 8},
                num_hidden_layers=3,
                q_lora_rank=24,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=12,
                first_k_dense_replace=1,
                n_routed_experts=16,
                n_shared_experts=2,
                num_experts_per_tok=3,
                n_group=4,
                topk_group=2,
                moe_intermediate_size=16,
                num_nextn_predict_layers=0,
                rope_parameters=rope(
                    "yarn",
                    factor=8.0,
                    beta_fast=8.0,
                    beta_slow=1.0,
                    mscale=1.0,
                    mscale_all_dim=0.8,
                    original_max_position_embeddings=64,
                ),
            )
        ),
    }

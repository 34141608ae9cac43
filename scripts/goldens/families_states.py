"""More models with states: the short convolutions of LFM2 and LFM3, Mamba 2 alone and beside attention, OLMo hybrid."""

from __future__ import annotations

from typing import Any

import transformers

from scripts.goldens.families_recurrent import RECURRENT as LINEAR
from scripts.goldens.families_recurrent import remember
from scripts.goldens.family import Family, rope

CONV, SLIDING, FULL = "conv", "sliding_attention", "full_attention"
# Sizes that are no powers of two; head counts divide over four devices.
ODD: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
    "mlp_multipliers": [1.4, 0.6],
}


def families() -> dict[str, Family]:
    return {
        "lfm2": Family(
            config=transformers.Lfm2Config(
                **ODD,
                num_hidden_layers=4,
                layer_types=[CONV, CONV, FULL, CONV],
                block_multiple_of=12,
                block_ffn_dim_multiplier=1.3,
                rope_parameters=rope(),
            ),
            final_norm="model.embedding_norm",
            flips_final_norm=True,
        ),
        "lfm2_moe": Family(
            config=transformers.Lfm2MoeConfig(
                **ODD | {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2},
                num_hidden_layers=4,
                layer_types=[CONV, FULL, CONV, CONV],
                conv_L_cache=5,
                conv_bias=True,
                num_dense_layers=1,
                moe_intermediate_size=12,
                num_experts=7,
                num_experts_per_tok=3,
                routed_scaling_factor=2.5,
                tie_word_embeddings=False,
                rope_parameters=rope(),
            ),
            final_norm="model.embedding_norm",
        ),
        "lfm3": Family(
            config=transformers.Lfm3Config(
                **ODD | {"num_key_value_heads": 2},
                head_dim=6,
                num_hidden_layers=5,
                layer_types=[CONV, FULL, SLIDING, CONV, SLIDING],
                conv_L_cache=4,
                sliding_window=11,
            ),
            final_norm="model.embedding_norm",
            flips_final_norm=True,
        ),
        "lfm3_odd": Family(
            config=transformers.Lfm3Config(
                **ODD | {"hidden_size": 40, "num_attention_heads": 8, "tie_word_embeddings": False},
                head_dim=10,
                num_hidden_layers=6,
                layer_types=[FULL, CONV, SLIDING, CONV, FULL, SLIDING],
                conv_L_cache=3,
                conv_bias=True,
                attention_bias=True,
                use_sandwich_norm=False,
                sliding_window=13,
            ),
            final_norm="model.embedding_norm",
        ),
        "mamba2": Family(
            config=transformers.Mamba2Config(
                **{name: ODD[name] for name in ODD if name not in ATTENTION},
                num_hidden_layers=3,
                num_heads=12,
                head_dim=8,
                n_groups=4,
                state_size=10,
                conv_kernel=3,
                use_bias=True,
                chunk_size=16,
            ),
            final_norm="backbone.norm_f",
            settle=remember,
        ),
        "mamba2_odd": Family(
            config=transformers.Mamba2Config(
                **{name: ODD[name] for name in ODD if name not in ATTENTION} | {"hidden_size": 40},
                num_hidden_layers=4,
                num_heads=20,
                head_dim=6,
                expand=3,
                n_groups=1,
                state_size=7,
                use_conv_bias=False,
                tie_word_embeddings=True,
                chunk_size=32,
            ),
            final_norm="backbone.norm_f",
            flips_final_norm=True,
            settle=remember,
        ),
        "falcon_h1": Family(
            config=transformers.FalconH1Config(
                **ODD,
                num_hidden_layers=2,
                mamba_d_ssm=64,
                mamba_n_heads=8,
                mamba_d_head=8,
                mamba_n_groups=2,
                mamba_d_state=12,
                mamba_chunk_size=16,
                mamba_rms_norm=True,
                mamba_norm_before_gate=False,
                rope_parameters=rope(),
                **MULTIPLIERS,
            ),
            final_norm="model.final_layernorm",
            settle=remember,
        ),
        "falcon_h1_odd": Family(
            config=transformers.FalconH1Config(
                **ODD | {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2},
                num_hidden_layers=3,
                mamba_d_ssm=72,
                mamba_n_heads=12,
                mamba_d_head=6,
                mamba_n_groups=1,
                mamba_d_state=9,
                mamba_d_conv=3,
                mamba_chunk_size=32,
                mamba_proj_bias=True,
                projectors_bias=True,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
                rope_parameters=rope(),
                **MULTIPLIERS | {"lm_head_multiplier": 1.0},
            ),
            final_norm="model.final_layernorm",
            flips_final_norm=True,
            settle=remember,
        ),
        "olmo_hybrid": Family(
            config=transformers.OlmoHybridConfig(
                **ODD,
                num_hidden_layers=3,
                layer_types=[LINEAR, FULL, LINEAR],
                linear_num_key_heads=4,
                linear_num_value_heads=8,
                linear_key_head_dim=6,
                linear_value_head_dim=10,
                rope_parameters=rope(rope_theta=None),
            ),
            settle=remember,
        ),
        "olmo_hybrid_odd": Family(
            config=transformers.OlmoHybridConfig(
                **ODD | {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2},
                num_hidden_layers=4,
                linear_conv_kernel_dim=3,
                linear_allow_neg_eigval=False,
                attention_bias=True,
                tie_word_embeddings=True,
                rope_parameters=rope(),
            ),
            flips_final_norm=True,
            settle=remember,
        ),
    }

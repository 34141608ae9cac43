"""More models with states: the short convolutions of LFM2 and LFM3."""

from __future__ import annotations

from typing import Any

import transformers

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
    }

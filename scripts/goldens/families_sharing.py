"""Decoders whose last layers read the keys and values of earlier ones: Gemma 3n and Gemma 4."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from scripts.goldens.family import TINY, Family, rope

LAYERS = ["sliding_attention", "full_attention"] * 4
SMALL: dict[str, Any] = TINY | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_kv_shared_layers": 4,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
}


SCALES = {
    "q_norm.weight": 0.4,  # scores are not divided by the root of the head dimension
    "router.proj.weight": SMALL["hidden_size"] ** 0.5,  # its inputs are divided by this
    "modality_router.weight": 4.0,  # its inputs are divided by the hidden size
    "model.norm.weight": 0.6,  # rounding of their many sums is twice that of others, so their logits are smaller
}


def balance(model: torch.nn.Module) -> None:
    """Scores and routers of the spread that others have."""
    for name, param in model.named_parameters():
        for end, scale in SCALES.items():
            if name.endswith(end):
                param.mul_(scale)


def families() -> dict[str, Family]:
    return {
        "gemma3n": Family(
            config=transformers.Gemma3nTextConfig(
                **SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2},
                vocab_size_per_layer_input=240,
                altup_num_inputs=3,
                laurel_rank=8,
                activation_sparsity_pattern=[0.8] * 3 + [0.0] * 5,
                final_logit_softcapping=30.0,
                rope_parameters={
                    "full_attention": rope(rope_theta=1000000.0),
                    "sliding_attention": rope(),
                },
            ),
            flips_final_norm=True,
            settle=balance,
        ),
        "gemma4": Family(
            config=transformers.Gemma4TextConfig(
                **SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2},
                vocab_size_per_layer_input=256,
                global_head_dim=32,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                use_double_wide_mlp=True,
                enable_moe_block=True,
                num_experts=4,
                top_k_experts=2,
                moe_intermediate_size=16,
                final_logit_softcapping=30.0,
                rope_parameters={
                    "full_attention": rope("proportional", partial_rotary_factor=0.25, rope_theta=1000000.0),
                    "sliding_attention": rope(),
                },
            ),
            flips_final_norm=True,
            settle=balance,
        ),
    }

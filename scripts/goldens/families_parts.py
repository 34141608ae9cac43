"""Families made of parts of others, two of each: one as released models are, one of odd sizes and other switches."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPooling

from scripts.goldens.families_inputs import IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START, ImageInputs
from scripts.goldens.family import TINY, Arrays, Family, rope
from scripts.goldens.setting_cases import PIXTRAL

PLAIN: dict[str, Any] = TINY | {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
ODD: dict[str, Any] = TINY | {
    "vocab_size": 77,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_hidden_layers": 3,
}
SLIDING, FULL = "sliding_attention", "full_attention"
SCALES: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "in_channels": 1,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "window_size": 8,
    "fullatt_block_indexes": [0],
}


class PlainImageInputs(ImageInputs):
    """Embeddings of images in the places of placeholder tokens, and nothing for later layers."""

    num_deepstack = 0

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def image(self, extras: Arrays) -> Any:
        return BaseModelOutputWithPooling(pooler_output=[torch.from_numpy(extras["embeds"])])


def never_write_placeholders(model: torch.nn.Module) -> None:
    """No continuation has a token that stands for an image."""
    model.lm_head.weight[IMAGE_TOKEN:].zero_()


def yarn(**more: Any) -> dict[str, Any]:
    return rope("yarn", factor=8.0, beta_fast=8.0, original_max_position_embeddings=32, **more)


def ministral_rope() -> dict[str, Any]:
    return yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)


def mistral3(text: dict[str, Any]) -> Family:
    config = transformers.Mistral3Config(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=False)
    return Family(
        config=config, model_class=transformers.AutoModelForImageTextToText, final_norm="model.language_model.norm"
    )


def qwen2_5_vl(text: dict[str, Any], **outer: Any) -> Family:
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    ends = {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    size = text["hidden_size"]
    return Family(
        config=transformers.Qwen2_5_VLConfig(
            text_config={**text, "vocab_size": 256},
            vision_config=QWEN_VISION | {"out_hidden_size": size},
            **tokens,
            **ends,
            **outer,
        ),
        model_class=transformers.AutoModelForImageTextToText,
        inputs=PlainImageInputs(size),
        final_norm="model.language_model.norm",
        settle=never_write_placeholders,
    )


def plain_families() -> dict[str, Family]:
    """As released models are."""
    full_and_yarn = {FULL: yarn(rope_theta=500.0), SLIDING: rope(rope_theta=500.0)}
    return {
        "olmo2": Family(config=transformers.Olmo2Config(**PLAIN, rope_parameters=rope())),
        "olmo3": Family(config=transformers.Olmo3Config(**PLAIN, sliding_window=16, rope_parameters=full_and_yarn)),
        "smollm3": Family(config=transformers.SmolLM3Config(**PLAIN, rope_parameters=rope()), flips_final_norm=True),
        "gemma": Family(
            config=transformers.GemmaConfig(**PLAIN, head_dim=16, rope_parameters=rope()), flips_final_norm=True
        ),
        "glm4": Family(config=transformers.Glm4Config(**PLAIN, head_dim=16, rope_parameters=rope())),
        "glm4_moe": Family(
            config=transformers.Glm4MoeConfig(
                **PLAIN | EXPERTS, use_qk_norm=True, attention_bias=True, num_mtp_layers=0, rope_parameters=rope()
            )
        ),
        "cohere": Family(
            config=transformers.CohereConfig(**PLAIN, logit_scale=0.7, rope_parameters=rope()), flips_final_norm=True
        ),
        "cohere2": Family(
            config=transformers.Cohere2Config(**PLAIN, logit_scale=0.7, sliding_window=16, rope_parameters=rope()),
            flips_final_norm=True,
        ),
        "granite": Family(config=transformers.GraniteConfig(**PLAIN, **SCALES, rope_parameters=rope())),
        "ministral3": Family(
            config=transformers.Ministral3Config(**PLAIN, head_dim=16, rope_parameters=ministral_rope())
        ),
        "mistral3": mistral3(
            {**PLAIN, "model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_parameters": rope()}
        ),
        "minimax_m2": Family(
            config=transformers.MiniMaxM2Config(
                **PLAIN | {"intermediate_size": 16, "num_experts_per_tok": 3},
                head_dim=16,
                num_local_experts=8,
                rotary_dim=8,
                rope_parameters=rope(),
            )
        ),
        "qwen2_5_vl": qwen2_5_vl({**PLAIN, "rope_parameters": rope(mrope_section=[2, 1, 1])}),
    }


def odd_families() -> dict[str, Family]:
    """Of odd sizes and other switches."""
    windows = [SLIDING, FULL, SLIDING]
    odd_mrope = ODD | {"hidden_size": 60, "rope_parameters": rope(mrope_section=[1, 3, 1])}
    return {
        "olmo2_odd": Family(
            config=transformers.Olmo2Config(**ODD, attention_bias=True, hidden_act="gelu", rope_parameters=rope())
        ),
        "olmo3_odd": Family(
            config=transformers.Olmo3Config(
                **ODD,
                layer_types=windows,
                sliding_window=13,
                attention_bias=True,
                rope_parameters={FULL: rope(rope_theta=700.0), SLIDING: rope("linear", factor=2.0)},
            )
        ),
        "smollm3_odd": Family(
            config=transformers.SmolLM3Config(
                **ODD,
                no_rope_layers=[0, 1, 0],
                use_sliding_window=True,
                sliding_window=13,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=False,
                rope_parameters=yarn(),
            )
        ),
        "gemma_odd": Family(
            config=transformers.GemmaConfig(
                **ODD | {"num_key_value_heads": 1},
                attention_bias=True,
                hidden_act="silu",
                tie_word_embeddings=False,
                rope_parameters=rope(),
            )
        ),
        "glm4_odd": Family(
            config=transformers.Glm4Config(
                **ODD,
                attention_bias=False,
                tie_word_embeddings=True,
                rope_parameters=rope(partial_rotary_factor=0.6),
            ),
            flips_final_norm=True,
        ),
        "glm4_moe_odd": Family(
            config=transformers.Glm4MoeConfig(
                **ODD | EXPERTS | {"n_routed_experts": 15},
                n_shared_experts=2,
                n_group=5,
                topk_group=3,
                first_k_dense_replace=2,
                norm_topk_prob=False,
                routed_scaling_factor=0.7,
                num_mtp_layers=0,
                rope_parameters=rope(partial_rotary_factor=0.4),
            )
        ),
        "cohere_odd": Family(
            config=transformers.CohereConfig(
                **ODD | {"hidden_size": 44},
                logit_scale=0.6,
                attention_bias=True,
                tie_word_embeddings=False,
                rope_parameters=yarn(),
            )
        ),
        "cohere2_odd": Family(
            config=transformers.Cohere2Config(
                **ODD,
                layer_types=windows,
                sliding_window=13,
                logit_scale=0.6,
                tie_word_embeddings=False,
                rope_parameters=rope(),
            )
        ),
        "granite_odd": Family(
            config=transformers.GraniteConfig(
                **ODD | SCALES,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
                rope_parameters=rope("linear", factor=2.0),
            ),
            flips_final_norm=True,
        ),
        "ministral3_odd": Family(
            config=transformers.Ministral3Config(**ODD, sliding_window=13, rope_parameters=ministral_rope())
        ),
        "mistral3_odd": mistral3({**ODD, "model_type": "ministral3", "rope_parameters": ministral_rope()}),
        "minimax_m2_odd": Family(
            config=transformers.MiniMaxM2Config(
                **ODD | {"intermediate_size": 20, "num_experts_per_tok": 2},
                num_local_experts=7,
                rotary_dim=4,
                rope_parameters=rope(),
            )
        ),
        "qwen2_5_vl_odd": qwen2_5_vl(
            {**odd_mrope, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}
        ),
    }


def families() -> dict[str, Family]:
    return plain_families() | odd_families()

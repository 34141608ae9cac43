"""Models whose language model is one part of several: Mistral 3, Qwen2.5-VL, Qwen3-VL, Qwen3.5."""

from __future__ import annotations

from tests.models.config_files.released_configs import GEMMA_4_26B, GEMMA_4_31B, gemma4, qwen3_5_27b, qwen3_vl
from tests.models.released.experts import QWEN3_MOE
from tests.models.released.released import AIC, MLC, QUOTED, Data, Released, sized

MINISTRAL_3_3B: Data = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "max_position_embeddings": 262_144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16_384,
            "rope_theta": 1_000_000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": 131_072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
QWEN2_5_VL_7B: Data = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "hidden_act": "silu",
    "image_token_id": 151_655,
    "max_position_embeddings": 128_000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1_000_000.0,
    "sliding_window": 32_768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "video_token_id": 151_656,
    "vision_config": {"depth": 32, "hidden_size": 1280, "window_size": 112},
    "vision_end_token_id": 151_653,
    "vision_start_token_id": 151_652,
    "vision_token_id": 151_654,
    "vocab_size": 152_064,
}
NOT_IN_VL = ("architectures", "output_router_logits", "rope_scaling", "sliding_window", "use_sliding_window")
QWEN3_VL_MOE: Data = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151_655,
    "model_type": "qwen3_vl_moe",
    "text_config": sized(
        {key: value for key, value in QWEN3_MOE.items() if key not in NOT_IN_VL},
        (2048, 6144, 48, 32, 4),
        max_position_embeddings=262_144,
        moe_intermediate_size=768,
        rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        rope_theta=5_000_000,
    ),
    "tie_word_embeddings": False,
    "video_token_id": 151_656,
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27},
}


def qwen3_5_moe(num_layers: int, **sizes: int) -> Data:
    """Of Qwen3.5 with experts: what the dense one has, but for its feed-forward part."""
    data = qwen3_5_27b()
    dense = ("bos_token_id", "intermediate_size", "output_gate_type", "partial_rotary_factor")
    text = {key: value for key, value in data["text_config"].items() if key not in dense}
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (num_layers // 4)
    text |= {"layer_types": layers, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": num_layers}
    text |= {"model_type": "qwen3_5_moe_text", "num_key_value_heads": 2, **sizes}
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    return data | outer | {"text_config": text}


INNER = (
    Released("mistralai/Ministral-3-3B-Reasoning-2512", MLC, MINISTRAL_3_3B),
    Released("Qwen/Qwen2.5-VL-7B-Instruct", QUOTED, sized(QWEN2_5_VL_7B, (3584, 18_944, 28, 28, 4))),
    Released("Qwen/Qwen3-VL-2B-Instruct", AIC, qwen3_vl(2048, 6144, 28, 16)),
    Released("Qwen/Qwen3-VL-4B-Instruct", AIC, qwen3_vl(2560, 9728, 36, 32)),
    Released("Qwen/Qwen3-VL-30B-A3B-Instruct", AIC, QWEN3_VL_MOE),
    Released("Qwen/Qwen3.5-27B", AIC, qwen3_5_27b()),
    Released("google/gemma-4-26B-A4B-it", AIC, gemma4(**GEMMA_4_26B)),
    Released("google/gemma-4-31B-it", AIC, gemma4(**GEMMA_4_31B)),
    Released(
        "Qwen/Qwen3.5-35B-A3B",
        AIC,
        qwen3_5_moe(
            40,
            hidden_size=2048,
            linear_num_value_heads=32,
            moe_intermediate_size=512,
            num_attention_heads=16,
            shared_expert_intermediate_size=512,
        ),
    ),
    Released(
        "Qwen/Qwen3.5-122B-A10B",
        AIC,
        qwen3_5_moe(
            48,
            hidden_size=3072,
            linear_num_value_heads=64,
            moe_intermediate_size=1024,
            num_attention_heads=32,
            shared_expert_intermediate_size=1024,
        ),
    ),
)

"""What config.json of released models has, so far as it decides which keys have to be known."""

from __future__ import annotations

from typing import Any

Data = dict[str, Any]


def qwen3_vl(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> Data:
    """Of Qwen/Qwen3-VL-2B-Instruct and -4B-Instruct."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151_643,
        "dtype": "bfloat16",
        "eos_token_id": 151_645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 262_144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5_000_000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151_936,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151_655,
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151_656,
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24},
        "vision_end_token_id": 151_653,
        "vision_start_token_id": 151_652,
    }


def qwen3_5_27b(**rope: Any) -> Data:
    """Of Qwen/Qwen3.5-27B and of its successors of the same architecture, with `rope` in its rotary embedding."""
    rope_parameters = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    }
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": 248_044,
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": rope_parameters | rope,
        "tie_word_embeddings": False,
        "vocab_size": 248_320,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "generation_config": {"temperature": 1.0, "top_k": 20},
        "image_token_id": 248_056,
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
        "top_p": 0.95,
        "video_token_id": 248_057,
        "vision_config": {"depth": 27},
        "vision_end_token_id": 248_054,
        "vision_start_token_id": 248_053,
    }


def gemma4(**text: Any) -> Data:
    """Of google/gemma-4-31B-it and -26B-A4B-it."""
    common = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "model_type": "gemma4_text",
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 258_881,
        "boa_token_id": 256_000,
        "boi_token_id": 255_999,
        "dtype": "bfloat16",
        "eoa_token_id": 258_883,
        "eoa_token_index": 258_883,
        "eoi_token_id": 258_882,
        "eos_token_id": [1, 106],
        "image_token_id": 258_880,
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": common | text,
        "tie_word_embeddings": True,
        "video_token_id": 258_884,
        "vision_config": {"hidden_size": 1152},
        "vision_soft_tokens_per_image": 280,
    }


GEMMA_4_31B: Data = {
    "enable_moe_block": False,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "top_k_experts": None,
}
GEMMA_4_26B: Data = {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
YARN: Data = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
# Name -> config.json; layers, longest length, whether the head is tied, the cache of a token.
RELEASED: dict[str, tuple[Data, tuple[int, int, bool, str]]] = {
    "Qwen3-VL-2B": (qwen3_vl(2048, 6144, 28, 16), (28, 262_144, True, "8 KV heads of 128")),
    "Qwen3-VL-4B": (qwen3_vl(2560, 9728, 36, 32), (36, 262_144, True, "8 KV heads of 128")),
    "Qwen3.5-27B": (qwen3_5_27b(), (64, 262_144, False, "4 KV heads of 256, 48 layers with states")),
    "Qwen3.5-27B, YaRN": (qwen3_5_27b(**YARN), (64, 1_048_576, False, "4 KV heads of 256, 48 layers with states")),
    "gemma-4-31B": (
        gemma4(**GEMMA_4_31B),
        (60, 262_144, True, "16 KV heads of 256, 4 of 512 in full layers"),
    ),
    "gemma-4-26B-A4B": (
        gemma4(**GEMMA_4_26B),
        (30, 262_144, True, "8 KV heads of 256, 2 of 512 in full layers"),
    ),
}
# Architecture -> keys of released models that change nothing, since they say what is computed anyway.
SAID_ANYWAY: dict[str, Data] = {
    "LlamaForCausalLM": {"max_sequence_length": 16_384, "temperature": 0.9, "top_p": 0.6},
    "Phi3ForCausalLM": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "Qwen2ForCausalLM": {"dual_chunk_attention_config": {"chunk_size": 262_144}},
    "Qwen3MoeForCausalLM": {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "NemotronHForCausalLM": {"time_step_rank": 256},
    "DeepseekV3ForCausalLM": {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "seq_aux": True},
    "GptOssForCausalLM": {"experts_per_token": 4, "initial_context_length": 4096},
    "Llama4ForCausalLM": {"for_llm_compressor": False, "cache_implementation": "hybrid"},
}
# The same with values that would change what is computed, if transformers went by them.
COMPUTED_OTHERWISE: dict[str, Data] = {
    "Phi3ForCausalLM": {"full_attn_mod": 2, "interpolate_factor": 2, "lm_head_bias": True, "mlp_bias": True},
    "Qwen3MoeForCausalLM": {"qkv_bias": True, "shared_expert_intermediate_size": 16, "use_qk_norm": False},
    "Qwen3_5ForCausalLM": {"output_gate_type": "sigmoid", "attn_output_gate": False, "mlp_only_layers": [1]},
    "Qwen3_5MoeForCausalLM": {"norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {"moe_layer_freq": 2, "num_key_value_heads": 2},
    "LlamaForCausalLM": {"sliding_window": 8, "logits_scaling": 2.0, "partial_rotary_factor": 0.5},
}

"""Dense models: Llama and its kin, Qwen2 and 3, Mistral, Phi, Gemma, OLMo, Command R, Granite, SmolLM."""

from __future__ import annotations

from tests.models.released.released import AIC, FP8, MLC, QUOTED, Data, Released, sized

LLAMA: Data = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32_000,
}


def llama3(factor: float, **more: object) -> Data:
    """Of Llama 3.1 and 3.2."""
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return LLAMA | {
        "attention_bias": False,
        "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
        "max_position_embeddings": 131_072,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {"factor": factor, "rope_type": "llama3"} | scaling,
        "rope_theta": 500_000.0,
        "vocab_size": 128_256,
        **more,
    }


SMOLLM2 = LLAMA | {
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49_152,
}
QWEN2: Data = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
# fmt: off
PHI4_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533,
    5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651,
    14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03,
    32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]
# fmt: on
PHI4_MINI: Data = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 199_999,
    "embd_pdrop": 0.0,
    "eos_token_id": 199_999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": PHI4_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10_000.0,
    "sliding_window": 262_144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200_064,
}
GEMMA: Data = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256_000,
}
GEMMA2: Data = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256_000,
}
GEMMA3_1B: Data = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262_144,
}
OLMO2: Data = {
    "architectures": ["Olmo2ForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 100_352,
}
OLMO3_7B = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
    "max_position_embeddings": 65_536,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100_278,
}
AYA_23: Data = {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000,
    "torch_dtype": "float16",
    "use_qk_norm": False,
    "vocab_size": 256_000,
}
GRANITE: Data = {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 131_072,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10_000_000, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 10_000_000,
    "tie_word_embeddings": False,
    "vocab_size": 100_352,
}
SMOLLM3: Data = {
    "architectures": ["SmolLM3ForCausalLM"],
    "bos_token_id": 128_000,
    "eos_token_id": 128_012,
    "hidden_act": "silu",
    "max_position_embeddings": 65_536,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5_000_000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128_256,
}
MISTRAL_V3 = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "vocab_size": 32_768,
}
CODE = {"max_position_embeddings": 16_384, "rope_theta": 1_000_000, "vocab_size": 32_016}
SMOLLM = {"rope_theta": 10_000.0, "tie_word_embeddings": True, "vocab_size": 49_152}
MIMO = LLAMA | {
    "architectures": ["MiMoForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "num_nextn_predict_layers": 1,
    "rope_theta": 640_000,
    "vocab_size": 151_680,
}

DENSE = (
    Released("meta-llama/Llama-2-13b-hf", MLC, sized(LLAMA, (5120, 13_824, 40, 40, 40), pretraining_tp=2)),
    Released("meta-llama/Llama-2-70b-hf", MLC, sized(LLAMA, (8192, 28_672, 80, 64, 8))),
    Released("codellama/CodeLlama-34b-hf", MLC, sized(LLAMA | CODE, (8192, 22_016, 48, 64, 8))),
    Released("TinyLlama/TinyLlama-1.1B-Chat-v1.0", MLC, sized(LLAMA, (2048, 5632, 22, 32, 4), rope_theta=10_000.0)),
    Released("meta-llama/Llama-3.1-8B", AIC, sized(llama3(8.0), (4096, 14_336, 32, 32, 8))),
    Released("meta-llama/Llama-3.1-70B", AIC, sized(llama3(8.0), (8192, 28_672, 80, 64, 8))),
    Released("meta-llama/Llama-3.1-405B", AIC, sized(llama3(8.0), (16_384, 53_248, 126, 128, 8))),
    Released(
        "meta-llama/Llama-3.2-1B-Instruct",
        MLC,
        sized(llama3(32.0, head_dim=64, tie_word_embeddings=True), (2048, 8192, 16, 32, 8)),
    ),
    Released(
        "meta-llama/Llama-3.2-3B-Instruct",
        MLC,
        sized(llama3(32.0, head_dim=128, tie_word_embeddings=True), (3072, 8192, 28, 24, 8)),
    ),
    Released("HuggingFaceTB/SmolLM-1.7B-Instruct", MLC, sized(LLAMA | SMOLLM, (2048, 8192, 24, 32, 32))),
    Released("HuggingFaceTB/SmolLM2-135M-Instruct", MLC, sized(SMOLLM2, (576, 1536, 30, 9, 3))),
    Released("HuggingFaceTB/SmolLM2-360M-Instruct", MLC, sized(SMOLLM2, (960, 2560, 32, 15, 5))),
    Released("HuggingFaceTB/SmolLM3-3B", QUOTED, sized(SMOLLM3, (2048, 11_008, 36, 16, 4))),
    Released("mistralai/Mistral-7B-v0.3", MLC, sized(MISTRAL_V3, (4096, 14_336, 32, 32, 8))),
    Released(
        "Qwen/Qwen2-0.5B-Instruct",
        MLC,
        sized(QWEN2, (896, 4864, 24, 14, 2), max_window_layers=24, sliding_window=32_768, tie_word_embeddings=True),
    ),
    Released(
        "Qwen/Qwen2-7B-Instruct",
        MLC,
        sized(
            QWEN2,
            (3584, 18_944, 28, 28, 4),
            max_window_layers=28,
            sliding_window=131_072,
            tie_word_embeddings=False,
            vocab_size=152_064,
        ),
    ),
    Released(
        "Qwen/Qwen2.5-3B-Instruct",
        MLC,
        sized(QWEN2, (2048, 11_008, 36, 16, 2), max_window_layers=70, sliding_window=32_768, tie_word_embeddings=True),
    ),
    Released(
        "Qwen/Qwen3-0.6B",
        AIC,
        sized(QWEN3, (1024, 3072, 28, 16, 8), max_window_layers=28, tie_word_embeddings=True),
    ),
    Released(
        "Qwen/Qwen3-1.7B",
        AIC,
        sized(QWEN3, (2048, 6144, 28, 16, 8), max_window_layers=28, tie_word_embeddings=True),
    ),
    Released("Qwen/Qwen3-32B", AIC, sized(QWEN3, (5120, 25_600, 64, 64, 8), max_window_layers=64)),
    Released(
        "Qwen/Qwen3-32B-FP8",
        AIC,
        sized(QWEN3, (5120, 25_600, 64, 64, 8), max_window_layers=64, quantization_config=FP8),
    ),
    Released("microsoft/Phi-4-mini-instruct", MLC, sized(PHI4_MINI, (3072, 8192, 32, 24, 8))),
    Released("google/gemma-2b", MLC, sized(GEMMA, (2048, 16_384, 18, 8, 1))),
    Released(
        "google/gemma-2-2b-it",
        MLC,
        sized(GEMMA2, (2304, 9216, 26, 8, 4), eos_token_id=[1, 107], head_dim=256, query_pre_attn_scalar=256),
    ),
    Released(
        "google/gemma-2-27b",
        MLC,
        sized(GEMMA2, (4608, 36_864, 46, 32, 16), head_dim=128, query_pre_attn_scalar=144),
    ),
    Released("google/gemma-3-1b-it", MLC, sized(GEMMA3_1B, (1152, 6912, 26, 4, 1))),
    Released("allenai/OLMo-2-1124-7B", MLC, sized(OLMO2, (4096, 11_008, 32, 32, 32))),
    Released("allenai/OLMo-2-1124-13B", MLC, sized(OLMO2, (5120, 13_824, 40, 40, 40))),
    Released("allenai/OLMo-2-0325-32B", MLC, sized(OLMO2, (5120, 27_648, 64, 40, 8))),
    Released("allenai/Olmo-3-7B-Instruct", QUOTED, sized(OLMO3_7B, (4096, 11_008, 32, 32, 32))),
    Released("CohereLabs/aya-23-8B", MLC, sized(AYA_23, (4096, 14_336, 32, 32, 8))),
    Released("ibm-granite/granite-4.2-3b", QUOTED, sized(GRANITE, (2560, 8192, 40, 40, 8))),
    Released(
        "XiaomiMiMo/MiMo-7B-Base",
        AIC,
        sized(MIMO, (4096, 11_008, 36, 32, 8)),
        refused="expected one of the architectures",
    ),
)

"""Models with experts: Mixtral, Qwen3, DeepSeek and Kimi K2, GPT-OSS, GLM 4.5, MiniMax M2, Nemotron 3."""

from __future__ import annotations

from tests.models.released.llamas import LLAMA, QWEN3
from tests.models.released.released import AIC, BRIDGE, FP8, MLC, Data, Released, sized

MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1_000_000,
    "sliding_window": None,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
}
DEEPSEEK: Data = {
    "attention_bias": False,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}


def yarn(factor: float, mscale: float, beta_fast: float = 32) -> Data:
    """Of DeepSeek and Kimi K2."""
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


DEEPSEEK_V2_LITE = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "bos_token_id": 100_000,
    "eos_token_id": 100_001,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "rope_scaling": yarn(40, 0.707),
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102_400,
}
DEEPSEEK_V3 = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": yarn(40, 1.0),
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129_280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163_584,
    "eos_token_id": 163_585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131_072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(32.0, 1.0, beta_fast=1.0),
    "rope_theta": 50_000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163_840,
}
GPT_OSS: Data = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200_002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}
IN_TURNS = ["sliding_attention", "full_attention"]
GLM45: Data = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 151_552,
}
GLM45_355B = {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
GLM45_AIR = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
MINIMAX_M2: Data = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "head_dim": 128,
    "hidden_act": "silu",
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5_000_000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200_064,
}
NEMOTRON_SUPER: Data = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_experts_per_tok": 22,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "residual_in_fp32": False,
    "rope_theta": 10_000,
    "routed_scaling_factor": 5.0,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131_072,
}
CODER = {"moe_intermediate_size": 2560, "num_experts": 160, "rope_theta": 10_000_000, "qkv_bias": False}

SPARSE = (
    Released(
        "mistralai/Mixtral-8x22B-v0.1", AIC, sized(MIXTRAL, (6144, 16_384, 56, 48, 8), max_position_embeddings=65_536)
    ),
    Released(
        "Qwen/Qwen3-30B-A3B",
        AIC,
        sized(QWEN3_MOE, (2048, 6144, 48, 32, 4), max_window_layers=48, moe_intermediate_size=768),
    ),
    Released(
        "Qwen/Qwen3-235B-A22B-FP8",
        AIC,
        sized(
            QWEN3_MOE,
            (4096, 12_288, 94, 64, 4),
            max_window_layers=94,
            moe_intermediate_size=1536,
            quantization_config=FP8 | {"modules_to_not_convert": ["lm_head"]},
        ),
    ),
    Released(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        AIC,
        sized(
            QWEN3_MOE | CODER,
            (6144, 8192, 62, 96, 8),
            max_position_embeddings=262_144,
            max_window_layers=62,
            shared_expert_intermediate_size=0,
            use_qk_norm=True,
        ),
    ),
    Released("deepseek-ai/DeepSeek-V2-Lite", MLC, sized(DEEPSEEK_V2_LITE, (2048, 10_944, 27, 16, 16))),
    Released("deepseek-ai/DeepSeek-R1", AIC, sized(DEEPSEEK_V3, (7168, 18_432, 61, 128, 128))),
    Released("moonshotai/Kimi-K2-Instruct", AIC, sized(KIMI_K2, (7168, 18_432, 61, 64, 64))),
    Released(
        "openai/gpt-oss-20b",
        AIC,
        sized(GPT_OSS, (2880, 2880, 24, 64, 8), layer_types=IN_TURNS * 12, num_local_experts=32),
    ),
    Released("zai-org/GLM-4.5", BRIDGE, sized(GLM45 | GLM45_355B, (5120, 12_288, 92, 96, 8))),
    Released("zai-org/GLM-4.5-Air", BRIDGE, sized(GLM45 | GLM45_AIR, (4096, 10_944, 46, 96, 8))),
    Released(
        "MiniMaxAI/MiniMax-M2.5", AIC, sized(MINIMAX_M2, (3072, 1536, 62, 48, 8), max_position_embeddings=196_608)
    ),
    Released(
        "MiniMaxAI/MiniMax-M2.7",
        AIC,
        sized(MINIMAX_M2, (3072, 1536, 62, 48, 8), attn_type_list=[1] * 62, max_position_embeddings=204_800),
    ),
    Released("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", AIC, sized(NEMOTRON_SUPER, (4096, 2688, 88, 32, 2))),
)

"""Settings of every architecture: a small config with its parts switched on, other values of keys, weights. No torch.

Flow:    small_configs.py -> [setting_cases] -> scripts/make_setting_goldens.py, setting_goldens.py

A form is one value of one key that is not the base's; where a key counts only beside another, the form has both.
Weights are drawn by name and shape, so that tests draw again what transformers was given.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.goldens.setting_parts import BASES_OF_PARTS, OF_PARTS
from scripts.goldens.setting_values import FULL, LINEAR, SLIDING, YARN, With, rope
from scripts.goldens.small_configs import TEXT, Data, small_config

CONV = "conv"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
PROMPT_LENGTH = 40
NUM_MEL_BINS = 8


def long_rope(**parameters: Any) -> Data:
    """Factors of the four pairs of heads of eight numbers."""
    return rope("longrope", short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[1.0, 2.0, 4.0, 8.0], **parameters)


LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 16.0}
VISION: Data = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "in_channels": 1,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}
PIXTRAL: Data = {
    "model_type": "pixtral",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 8,
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 1,
}
MROPE: Data = {"rope_parameters": rope(mrope_section=[4, 2, 2], mrope_interleaved=True)}
OF_EXPERTS_V3: Data = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "v_head_dim": 12,
}
BASES: dict[str, Data] = {  # beside the small config
    "MixtralForCausalLM": {"head_dim": 8},  # transformers has YaRN for heads of a given size only
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Qwen3MoeForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": [0]},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "Gemma3ForCausalLM": {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "query_pre_attn_scalar": 24},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL] * 3,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
        "final_logit_softcapping": 5.0,
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL] * 3,
        "num_kv_shared_layers": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "final_logit_softcapping": 5.0,
    },
    "GptOssForCausalLM": {
        "swiglu_limit": 1.5,
        "rope_parameters": rope(
            "yarn", factor=4.0, beta_fast=8.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=32
        ),
    },
    "Llama4ForCausalLM": {
        "attention_chunk_size": 8,
        "floor_scale": 8,
        "attn_scale": 0.4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
    },
    "DeepseekV2ForCausalLM": {
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.0,
        "v_head_dim": 12,
    },
    "DeepseekV3ForCausalLM": OF_EXPERTS_V3,
    "DeepseekV32ForCausalLM": OF_EXPERTS_V3,
    "GlmMoeDsaForCausalLM": OF_EXPERTS_V3 | {"indexer_types": ["full", "shared", "full", "shared"]},
    "DeepseekV4ForCausalLM": {
        "layer_types": [SLIDING, CSA, HCA, CSA],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {CSA: 4, HCA: 16},
        "qk_rope_head_dim": 8,
        "sliding_window": 8,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "q_lora_rank": 24,
        "o_lora_rank": 16,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "swiglu_limit": 1.5,
        "num_nextn_predict_layers": 0,
    },
    "FalconH1ForCausalLM": {
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.8,
        "key_multiplier": 0.6,
        "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
        "mlp_multipliers": [1.4, 0.6],
    },
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "GraniteMoeHybridForCausalLM": {
        "layer_types": [LINEAR, FULL] * 2,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "position_embedding_type": "rope",
    },
    "Lfm2MoeForCausalLM": {"num_dense_layers": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
    "OlmoHybridForCausalLM": {"layer_types": [LINEAR, FULL] * 2, "linear_num_key_heads": 2},
    "NemotronHForCausalLM": {
        "head_dim": 16,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "n_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 32,
    },
    "Qwen3NextForCausalLM": {"layer_types": [LINEAR, FULL] * 2, "shared_expert_intermediate_size": 24},
    "Qwen3_5ForCausalLM": {"layer_types": [LINEAR, FULL] * 2},
    "Qwen3_5MoeForCausalLM": {"layer_types": [LINEAR, FULL] * 2, "shared_expert_intermediate_size": 24},
    "KimiLinearForCausalLM": {
        "layer_types": [LINEAR, FULL] * 2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_experts_per_tok": 3,
        "v_head_dim": 12,
    },
    "WhisperForConditionalGeneration": {"num_mel_bins": NUM_MEL_BINS, "max_target_positions": 64},
    **BASES_OF_PARTS,
    "MistralLarge4ForConditionalGeneration": OF_EXPERTS_V3
    | {
        "kv_source_layers": [0, 1, 0, 3],
        "no_rope_layers": [1, 0, 1, 0],
        "indexer_types": ["full", "shared", "full", "full"],
    },
    "Qwen3VLForConditionalGeneration": MROPE,
    "Qwen3VLMoeForConditionalGeneration": MROPE,
}
SPECIALS: Data = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.02}
ARCHITECTURES = (
    *TEXT,
    "MistralLarge4ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)

# Other values of a key: of any architecture, then of one. A dict has the value with what it needs beside it.
_ACTIVATIONS = ["gelu", "gelu_pytorch_tanh", "relu2", "relu", "gelu_new", "quick_gelu", "tanh"]
VALUES: dict[str, list[Any]] = {
    "hidden_size": [48],
    "intermediate_size": [40],
    "num_attention_heads": [8],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [24, None],
    "num_hidden_layers": [3],
    "hidden_act": ["silu", *_ACTIVATIONS],
    "hidden_activation": ["silu", *_ACTIVATIONS],
    "mlp_hidden_act": ["silu", *_ACTIVATIONS],
    "activation_function": ["silu", *_ACTIVATIONS],
    "mamba_hidden_act": _ACTIVATIONS,
    "rms_norm_eps": [0.1],
    "norm_eps": [0.1],
    "layer_norm_epsilon": [0.1],
    "max_position_embeddings": [512],
    "rope_parameters": [rope(rope_theta=500.0), YARN, rope("linear", factor=4.0)],
    "sliding_window": [5, None],
    "vocab_size": [72],
    "final_logit_softcapping": [2.0, None],
    "attn_logit_softcapping": [1.0, None],
    "query_pre_attn_scalar": [64],
    "layer_types": [[FULL] * 4, [FULL, SLIDING, SLIDING, FULL], [LINEAR, LINEAR, FULL, FULL]],
    "num_experts": [5],
    "num_local_experts": [5],
    "num_experts_per_tok": [1],
    "n_routed_experts": [24],
    "n_shared_experts": [2, None],
    "n_group": [1, 2],
    "topk_group": [1, 3],
    "topk_method": ["greedy"],
    "moe_intermediate_size": [20],
    "norm_topk_prob": [True, False],
    "q_lora_rank": [None, 12],
    "kv_lora_rank": [24],
    "qk_nope_head_dim": [16],
    "qk_rope_head_dim": [4],
    "v_head_dim": [6],
    "first_k_dense_replace": [0, 2],
    "mlp_only_layers": [[1, 2]],
    "decoder_sparse_step": [2],
    "use_bidirectional_attention": [True, "all", "vision"],
    "position_embedding_type": [None, "rope", "nope"],
    "time_step_limit": [[0.0, 0.05], [0.2, 0.5]],
    "rope_interleave": [False],
    "dtype": ["bfloat16"],
    "scoring_func": ["sigmoid", "softmax"],
    "max_window_layers": [0, 3],
    "partial_rotary_factor": [0.25],
    "mamba_ssm_cache_dtype": ["bfloat16"],
    "moe_latent_size": [16],
    "interpolate_factor": [2],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "output_attentions": [True],
    "pad_token_id": [3],
    "bos_token_id": [3],
    "eos_token_id": [3],
    "problem_type": ["regression"],
    "_name_or_path": ["x"],
    "begin_suppress_tokens": [[3]],
    "suppress_tokens": [[3]],
    "forced_decoder_ids": [[3]],
    "layer_norm_eps": [0.1],
}
LATENT: dict[str, list[Any]] = {  # of latent attention
    "num_attention_heads": [With({"num_attention_heads": 8, "num_key_value_heads": 8})],
    "num_key_value_heads": [2],
    "rope_parameters": [
        rope(rope_theta=500.0),
        YARN,
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    ],
}
INDEXER: dict[str, list[Any]] = {
    "index_n_heads": [12],
    "index_head_dim": [24, 4],
    "index_topk": [5, 64],
    "layer_types": [["full_attention"] * 4],
    "mlp_layer_types": [["dense", "dense", "sparse", "sparse"], ["sparse"] * 4, ["sparse", "dense"] * 2],
}
_BY_KIND = "full_attention", "sliding_attention"
OF_ONE: dict[str, dict[str, list[Any]]] = {
    **OF_PARTS,
    "LlamaForCausalLM": {
        "rope_parameters": [
            rope(rope_theta=500.0),
            rope("linear", factor=4.0),
            YARN,
            YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
            YARN | {"attention_factor": 1.5},
            YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
            YARN | {"truncate": False},
            LLAMA3,
            LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
            rope("dynamic", factor=4.0),
            long_rope(factor=2.0, original_max_position_embeddings=64),
            long_rope(factor=2.0, original_max_position_embeddings=16),
            long_rope(attention_factor=1.3, original_max_position_embeddings=64),
            rope("proportional", partial_rotary_factor=0.5),
            rope(partial_rotary_factor=0.5),
        ]
    },
    "Phi3ForCausalLM": {
        "rope_parameters": [
            rope(rope_theta=500.0),
            rope(partial_rotary_factor=0.5),
            With(rope_parameters=long_rope(), original_max_position_embeddings=64),
            With(rope_parameters=long_rope(), original_max_position_embeddings=16),
        ],
        "original_max_position_embeddings": [
            With(rope_parameters=long_rope(), original_max_position_embeddings=32),
        ],
        "sliding_window": [8],
    },
    "MixtralForCausalLM": {"sliding_window": [8]},
    "Qwen3MoeForCausalLM": {
        "sliding_window": [5, None, With(use_sliding_window=True, sliding_window=5, max_window_layers=2)],
        "num_local_experts": [6],
    },
    "Gemma3ForCausalLM": {
        "_sliding_window_pattern": [
            With(_sliding_window_pattern=3, layer_types=None),
            With(sliding_window_pattern=2, layer_types=None),
        ],
        "rope_parameters": [
            {kind: rope(rope_theta=500.0 if kind == FULL else 2000.0) for kind in _BY_KIND},
            {FULL: rope("linear", factor=8.0), SLIDING: rope()},
            {FULL: YARN, SLIDING: rope("linear", factor=2.0)},
        ],
    },
    "Gemma3nForCausalLM": {
        "rope_parameters": [{kind: rope(rope_theta=500.0 if kind == FULL else 2000.0) for kind in _BY_KIND}],
        "intermediate_size": [40, [40, 40, 48, 48, 56, 56]],
        "num_hidden_layers": [
            With(
                {
                    "num_hidden_layers": 5,
                    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
                    "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.0, 0.0],
                }
            )
        ],
        "layer_types": [[FULL] * 6, [FULL, SLIDING, SLIDING, FULL, FULL, SLIDING], None],
        "activation_sparsity_pattern": [None, [0.0, 0.5, 0.0, 0.5, 0.0, 0.9]],
        "num_kv_shared_layers": [0, 3],
        "vocab_size_per_layer_input": [48],
        "altup_num_inputs": [2],
        "altup_active_idx": [1],
        "altup_coef_clip": [0.1, None],
        "hidden_size_per_layer_input": [4],
    },
    "Gemma4ForCausalLM": {
        "rope_parameters": [
            {FULL: rope("proportional", partial_rotary_factor=0.5, rope_theta=500.0), SLIDING: rope(rope_theta=200.0)},
            {FULL: rope(), SLIDING: rope("linear", factor=2.0)},
        ],
        "num_hidden_layers": [With({"num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]})],
        "layer_types": [[SLIDING] * 5 + [FULL], [FULL, SLIDING, SLIDING, FULL, FULL, FULL], None],
        "num_kv_shared_layers": [0, 3],
        "vocab_size": [With(vocab_size=72, vocab_size_per_layer_input=72)],
        "enable_moe_block": [False],
        "top_k_experts": [1],
        "vocab_size_per_layer_input": [48],
        "hidden_size_per_layer_input": [4, 0],
        "per_layer_config": [
            With(global_head_dim=8),
            With(num_global_key_value_heads=1, attention_k_eq_v=True),
            With(global_head_dim=None),
        ],
        "use_double_wide_mlp": [True],
    },
    "GptOssForCausalLM": {
        "rope_parameters": [rope(rope_theta=500.0), YARN | {"truncate": True}],
        "layer_types": [[FULL] * 4, [FULL, SLIDING, SLIDING, FULL]],
        "swiglu_alpha": [1.2],
    },
    "Llama4ForCausalLM": {
        "rope_parameters": [rope(rope_theta=500.0), LLAMA3],
        "attention_chunk_size": [16, None],
        "layer_types": [["full_attention"] * 4, ["full_attention", "chunked_attention"] * 2],
        "moe_layers": [[0, 2], []],
        "no_rope_layers": [[1, 1, 1, 0], [0, 1, 1, 1], []],
        "no_rope_layer_interval": [4],
        "interleave_moe_layer_step": [1, 4],
        "num_experts_per_tok": [2],
        "attn_scale": [0.9],
        "floor_scale": [4],
    },
    "DeepseekV2ForCausalLM": {
        **LATENT,
    },
    "DeepseekV3ForCausalLM": {
        **LATENT,
        "num_nextn_predict_layers": [0],
    },
    "DeepseekV32ForCausalLM": LATENT | INDEXER,
    "GlmMoeDsaForCausalLM": {
        **LATENT,
        **INDEXER,
        "indexer_types": [
            ["full"] * 4,
            ["full", "shared", "shared", "full"],
            ["shared", "full", "full", "full"],
            With(indexer_types=None, index_topk_pattern="FFSS"),
            With(indexer_types=None, index_topk_freq=3, index_skip_topk_offset=1),
            None,
        ],
    },
    "MistralLarge4ForConditionalGeneration": LATENT
    | INDEXER
    | {
        "indexer_types": [["full"] * 4, ["shared", "full", "full", "full"], None],
        "no_rope_layers": [[1] * 4, With(no_rope_layers=None, kv_source_layers=None), [1, 1, 0, 0]],
        "kv_source_layers": [None, [0, 1, 0, 1], [0, 0, 2, 3], [0, 1, 2]],
        "final_logit_softcapping": [2.0],
    },
    "DeepseekV4ForCausalLM": {
        "num_attention_heads": [8],
        "num_key_value_heads": [2],
        "n_routed_experts": [8],
        "layer_types": [[SLIDING] * 4, [CSA, HCA, SLIDING, CSA]],
        "mlp_layer_types": [["moe"] * 4, ["hash_moe"] * 4],
        "compress_rates": [{CSA: 8, HCA: 16}, {CSA: 4, HCA: 8}],
        "index_topk": [With(index_topk=5, index_n_heads=16), With(index_topk=5, index_n_heads=3)],
        "index_n_heads": [With(index_topk=4, index_n_heads=16)],
        "index_head_dim": [With(index_topk=5, index_n_heads=16, index_head_dim=8)],
        "hc_mult": [2],
        "hc_sinkhorn_iters": [1],
        "hc_eps": [0.1],
        "rope_parameters": [
            {
                "compress": rope(rope_theta=500.0, partial_rotary_factor=0.5),
                "main": rope(rope_theta=700.0, partial_rotary_factor=0.5),
            },
            {"compress": YARN | {"partial_rotary_factor": 0.5}, "main": rope(partial_rotary_factor=0.5)},
        ],
        "rope_theta": [500.0],
        "compress_rope_theta": [500.0],
        "o_groups": [4],
        "o_lora_rank": [8],
        "partial_rotary_factor": [With({"partial_rotary_factor": 0.25, "qk_rope_head_dim": None})],
        "qk_rope_head_dim": [4],
    },
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": [With(mamba_d_ssm=72), With(mamba_d_ssm=None, mamba_n_heads=8)],
        "mamba_d_head": [With(mamba_d_ssm=36, mamba_d_head=6), "auto"],
        "mamba_n_heads": [With(mamba_n_heads=12, mamba_d_head=4)],
        "mamba_expand": [With(mamba_d_ssm=None, mamba_expand=3, mamba_n_heads=12, mamba_d_head=8)],
        "mamba_chunk_size": [8],
        "mamba_n_groups": [1],
        "mamba_d_conv": [3],
        "mamba_rms_norm": [False],
        "mamba_norm_before_gate": [False],
        "ssm_multipliers": [None, [1.0] * 5, [2.0, 1.2, 0.9, 1.1, 0.3]],
        "mlp_multipliers": [None, [0.5, 2.0]],
        "head_dim": [24],
    },
    "OlmoHybridForCausalLM": {
        "layer_types": [[LINEAR] * 3 + [FULL], None],
        "rope_parameters": [rope(rope_theta=500.0), YARN, {"rope_type": "default", "rope_theta": None}],
        "linear_conv_kernel_dim": [3],
        "linear_num_key_heads": [4, None],
        "linear_num_value_heads": [8, None],
        "linear_key_head_dim": [16, None],
        "linear_value_head_dim": [12, None],
    },
    "Mamba2ForCausalLM": {
        "hidden_size": [With(hidden_size=48, num_heads=12)],
        "num_heads": [With(num_heads=4, head_dim=16)],
        "head_dim": [With(num_heads=16, head_dim=4)],
        "expand": [With(expand=3, num_heads=12)],
        "n_groups": [1],
        "conv_kernel": [3],
        "chunk_size": [8],
    },
    "JambaForCausalLM": {
        "attn_layer_period": [4],
        "attn_layer_offset": [0],
        "expert_layer_period": [1],
        "expert_layer_offset": [0],
        "mamba_d_conv": [3],
        "mamba_d_state": [16],
        "mamba_dt_rank": [3, "auto"],
        "mamba_expand": [3],
    },
    "GraniteMoeHybridForCausalLM": {
        "layer_types": [[FULL] * 4, [LINEAR, LINEAR, FULL, LINEAR]],
        "mamba_n_heads": [With({"mamba_n_heads": 4, "mamba_d_head": 16})],
        "mamba_d_head": [With({"mamba_n_heads": 16, "mamba_d_head": 4})],
        "mamba_expand": [With({"mamba_expand": 3, "mamba_n_heads": 12})],
        "mamba_chunk_size": [8],
        "mamba_n_groups": [1],
        "mamba_d_conv": [3],
        "num_local_experts": [0, 5],
        "logits_scaling": [3.0],
        "rope_parameters": [rope(rope_theta=500.0)],
    },
    "Lfm2ForCausalLM": {
        "layer_types": [[FULL] * 4, [CONV, CONV, FULL, CONV]],
        "full_attn_idxs": [With(layer_types=None, full_attn_idxs=[1]), With(layer_types=None)],
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": [[FULL] * 4, [CONV, CONV, FULL, CONV], None],
        "num_dense_layers": [0, 4],
    },
    "Lfm3ForCausalLM": {
        "layer_types": [[FULL] * 4, [CONV, CONV, SLIDING, CONV], None],
        "rope_parameters": [
            {FULL: rope("proportional", partial_rotary_factor=0.25, rope_theta=500.0), SLIDING: rope(rope_theta=200.0)},
            {FULL: rope(), SLIDING: rope("linear", factor=2.0)},
            {FULL: YARN, SLIDING: rope()},
        ],
        "full_attn_idxs": [[1]],
    },
    "NemotronHForCausalLM": {
        "layers_block_type": [[LINEAR, FULL, "mlp", "moe"], [FULL] * 3],
        "mamba_num_heads": [4],
        "mamba_head_dim": [16],
        "n_groups": [1],
        "conv_kernel": [3],
        "chunk_size": [8],
        "time_step_min": [0.3],
        "time_step_max": [0.01],
        "time_step_floor": [0.3],
        "norm_topk_prob": [False],
        "n_routed_experts": [6],
        "topk_group": [2],
        "mtp_layers_block_type": [["moe"]],
        "num_nextn_predict_layers": [1],
        "sliding_window": [8],
    },
    "Qwen3NextForCausalLM": {
        "rope_parameters": [rope(rope_theta=500.0, partial_rotary_factor=0.5), YARN | {"partial_rotary_factor": 0.5}]
    },
    "Qwen3_5ForCausalLM": {"rope_parameters": [rope(rope_theta=500.0, partial_rotary_factor=0.5)]},
    "Qwen3_5MoeForCausalLM": {"rope_parameters": [rope(rope_theta=500.0, partial_rotary_factor=0.5)]},
    "KimiLinearForCausalLM": {
        "num_attention_heads": [With({"num_attention_heads": 8, "num_key_value_heads": 8})],
        "num_key_value_heads": [2],
        "num_experts": [With(num_experts=6, num_local_experts=6)],
        "num_expert_group": [2],
        "topk_group": [With(topk_group=2, num_expert_group=4)],
        "num_experts_per_token": [With(num_experts_per_token=1, num_experts_per_tok=1)],
        "num_shared_experts": [2, 0],
        "model_max_length": [With(model_max_length=512, max_position_embeddings=512)],
        "mlp_layer_types": [["sparse"] * 4, ["dense", "dense", "sparse", "sparse"]],
        "layer_types": [[LINEAR] * 4, [FULL, LINEAR, LINEAR, FULL]],
        "linear_num_heads": [2],
        "linear_head_dim": [16],
        "linear_conv_kernel_dim": [3],
        "q_lora_rank": [12],
    },
    "WhisperForConditionalGeneration": {
        "d_model": [48],
        "encoder_layers": [1],
        "decoder_layers": [3],
        "encoder_attention_heads": [2],
        "decoder_attention_heads": [8],
        "num_mel_bins": [6],
        "max_source_positions": [20],
        "max_target_positions": [72],
        "decoder_start_token_id": [3],
        "median_filter_width": [5],
    },
    "Qwen3VLForConditionalGeneration": {
        "rope_parameters": [
            rope(rope_theta=500.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
            rope(mrope_section=[2, 3, 3], mrope_interleaved=True),
        ]
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "rope_parameters": [rope(rope_theta=500.0, mrope_section=[4, 2, 2], mrope_interleaved=True)]
    },
}
for _name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
    OF_ONE[_name] |= {
        "layer_types": [[LINEAR] * 3 + [FULL], [FULL] * 4],
        "linear_conv_kernel_dim": [3],
        "linear_num_key_heads": [4],
        "linear_num_value_heads": [8],
        "linear_key_head_dim": [16],
        "linear_value_head_dim": [16],
        "shared_expert_intermediate_size": [16],
    }


@dataclass(frozen=True)
class Form:
    """Another value of `key`; `change` has it, with what it needs beside it."""

    key: str
    change: Data


def base_config(architecture: str) -> Data:
    """The config.json with which a key's other values are compared."""
    data = small_config(architecture)
    base = copy.deepcopy(SPECIALS | BASES.get(architecture, {}))
    if "text_config" not in data:
        return data | base
    vision = PIXTRAL if architecture.startswith("Mistral") else VISION
    return data | {"text_config": data["text_config"] | base, "vision_config": vision}


def with_change(architecture: str, change: Data) -> Data:
    """The base with other values; null where the form says so."""
    data, change = base_config(architecture), copy.deepcopy(change)
    if "text_config" not in data:
        return data | change
    return data | {"text_config": data["text_config"] | change}


def forms(architecture: str, normal: Data) -> Iterator[Form]:
    """Every other value of every key of `normal`, which is the base as transformers writes it."""
    for key, value in normal.items():
        for other in _others(architecture, key, value):
            change = dict(other) if isinstance(other, With) else {key: other}
            if change != {key: value}:
                yield Form(key, change)


def _others(architecture: str, key: str, value: Any) -> Sequence[Any]:
    of_one = OF_ONE.get(architecture, {})
    if key in of_one:
        return of_one[key]
    if key in VALUES:
        return VALUES[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value + 1]
    if isinstance(value, float):
        return [1.5 * value + 0.125]
    if isinstance(value, str):
        return []
    return []


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:  # float32[shape]; int64 for tables of experts
    """A tensor of a checkpoint."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    if name.endswith("tid2eid"):
        return (random.randint(0, 6, (shape[0], 1)) + np.arange(shape[1])) % 6
    noise = random.standard_normal(shape)
    if name.endswith("A_log"):
        noise = np.log(0.05 + 1.95 * random.random_sample(shape))
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        noise = 0.5 * noise - 2.0
    elif name.endswith(("q_norm.weight", "q_layernorm.weight")):
        noise = 0.2 + 0.04 * noise  # large scores make noise of rounding larger from layer to layer
    elif len(shape) < 2:
        noise = 0.2 * noise + (1.0 if re.search(r"norm|\.D$|scale", name) else 0.0)
    else:
        noise = noise * fan_in(name, shape) ** -0.5
    return noise.astype(np.float32)


def fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Inputs of a weight."""
    if "conv" in name:
        return int(np.prod(shape[1:]))
    return shape[-2] if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else shape[-1]


def drawn_tokens(seed: int, length: int = PROMPT_LENGTH) -> np.ndarray:  # int32[length]
    """A prompt."""
    return np.random.RandomState(seed).randint(0, 64, length).astype(np.int32)


def drawn_features(num_bins: int, num_frames: int) -> np.ndarray:  # float32[num_bins, num_frames]
    """What an encoder hears."""
    return np.random.RandomState(1).standard_normal((num_bins, num_frames)).astype(np.float32)


def same_model(config: Any, other: Any) -> bool:
    """Whether two configs of kvjax compute the same: all but dtype, ends of texts and the longest one's length."""
    skipped = ("bos_token_id", "dtype", "eos_token_ids", "max_model_len")
    values = ({key: value for key, value in vars(one).items() if key not in skipped} for one in (config, other))
    return next(values) == next(values)

"""Keys of config.json that do not change the cache of models that are planned only.

Flow:    [key sets] -> hf_planned, which refuses any key that it neither reads nor finds here
Source:  the configuration_*.py of transformers; of DeepSeek V4 the files of deepseek-ai on the Hub
"""

from __future__ import annotations

# Of any decoder: nothing that its cache depends on.
DECODER_KEYS = frozenset(
    [
        "architectures",
        "attention_bias",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "mlp_bias",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    ]
)
DEEPSEEK_KEYS = frozenset(
    [
        "aux_loss_alpha",
        "ep_size",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_key_value_heads",
        "q_lora_rank",
        "qk_nope_head_dim",
        "routed_scaling_factor",
        "scoring_func",
        "seq_aux",
        "topk_group",
        "topk_method",
        "v_head_dim",
    ]
)
DEEPSEEK_V4_KEYS = DEEPSEEK_KEYS | frozenset(
    [
        "compress_rope_theta",
        "expert_dtype",
        "hc_eps",
        "hc_mult",
        "hc_sinkhorn_iters",
        "index_n_heads",
        "index_topk",
        "num_hash_layers",
        "o_groups",
        "o_lora_rank",
        "swiglu_limit",
    ]
)
GEMMA3N_KEYS = frozenset(
    [
        "activation_sparsity_pattern",
        "altup_active_idx",
        "altup_coef_clip",
        "altup_correct_scale",
        "altup_lr_multiplier",
        "altup_num_inputs",
        "final_logit_softcapping",
        "hidden_activation",
        "hidden_size_per_layer_input",
        "laurel_rank",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "vocab_size_per_layer_input",
    ]
)
GEMMA3N_OUTER_KEYS = frozenset(
    [
        "audio_config",
        "audio_soft_tokens_per_image",
        "audio_token_id",
        "boa_token_id",
        "eoa_token_id",
        "vision_soft_tokens_per_image",
    ]
)

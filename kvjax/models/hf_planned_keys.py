"""Keys of config.json that do not change the cache of models that are planned only.

Flow:    [key sets] -> hf_planned, which refuses any key that it neither reads nor finds here
Source:  the configuration_*.py of transformers
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

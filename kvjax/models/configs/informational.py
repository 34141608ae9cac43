"""Keys of config.json that change nothing that a decoder or a planner computes at inference.

Flow:    [key sets] -> ConfigKeys.finish
"""

from __future__ import annotations

# Of generation, which transformers takes of generation_config.json only.
GENERATION_KEYS = frozenset(
    [
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ]
)
# Of any model.
INFORMATIONAL_KEYS = GENERATION_KEYS | frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "_sliding_window_pattern",
        "attention_dropout",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_version",
        "use_cache",
    ]
)
# Of a multimodal model's outer config, beside `text_config`.
INFORMATIONAL_OUTER_KEYS = INFORMATIONAL_KEYS | frozenset(
    [
        "audio_config",
        "audio_soft_tokens_per_image",
        "audio_token_id",
        "boa_token_id",
        "boi_token_id",
        "boi_token_index",
        "dtype",
        "eoa_token_id",
        "eoa_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "eos_token_id",
        "bos_token_id",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "torch_dtype",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_soft_tokens_per_image",
        "vision_start_token_id",
    ]
)

"""Keys of config.json that change nothing that a decoder or a planner computes at inference.

Flow:    [key sets] -> ConfigKeys.finish
"""

from __future__ import annotations

# Of any model.
INFORMATIONAL_KEYS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
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
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "transformers_version",
        "unsloth_version",
        "use_cache",
    ]
)
# Of a multimodal model's outer config, beside `text_config`.
INFORMATIONAL_OUTER_KEYS = INFORMATIONAL_KEYS | frozenset(
    [
        "boi_token_id",
        "boi_token_index",
        "dtype",
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
        "vision_start_token_id",
    ]
)

"""The architectures whose config.json can be read, the defaults of their keys, and the keys that mean nothing here.

Flow:    [ARCHITECTURES] -> hf_config.parse_config
Source:  the configuration_*.py of transformers, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys that change nothing a decoder or a planner computes at inference.
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


@dataclass(frozen=True)
class Architecture:
    """How one entry of `architectures` is read: its family, the defaults of its keys, and where its text part is."""

    family: str
    defaults: Mapping[str, Any]
    has_text_config: bool = False
    has_mrope: bool = False


_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN3: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_DENSE = {**_QWEN3, "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", _LLAMA),
    "Qwen3ForCausalLM": Architecture("qwen3", _QWEN3_DENSE),
    "Qwen3MoeForCausalLM": Architecture("qwen3", _QWEN3_MOE),
    "Qwen3VLForConditionalGeneration": Architecture("qwen3", _QWEN3_DENSE, has_text_config=True, has_mrope=True),
    "Qwen3VLMoeForConditionalGeneration": Architecture("qwen3", _QWEN3_MOE, has_text_config=True, has_mrope=True),
    "Gemma3ForCausalLM": Architecture("gemma3", _GEMMA3),
    "Gemma3ForConditionalGeneration": Architecture("gemma3", _GEMMA3, has_text_config=True),
}
MOE_ARCHITECTURES = frozenset({"Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"})
# What a text config has from its outer config where it does not say it itself.
INHERITED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")

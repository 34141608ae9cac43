"""Small config.json contents for tests."""

from __future__ import annotations

from typing import Any


def llama_dict(**changes: Any) -> dict[str, Any]:
    """A small Llama without an end token; a change to `...` removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def gemma3_dict(**changes: Any) -> dict[str, Any]:
    """A small Gemma 3 in the form of transformers before version 5."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def qwen3_vl_dict(**text: Any) -> dict[str, Any]:
    """A small Qwen3-VL with experts."""
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 1,
        "text_config": llama_dict(
            **{
                "architectures": ...,
                "num_experts": 16,
                "moe_intermediate_size": 8,
                "norm_topk_prob": True,
                "num_experts_per_tok": 2,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5_000_000,
            }
            | text
        ),
        "vision_config": {"depth": 27},
        "video_token_id": 2,
        "tie_word_embeddings": False,
    }

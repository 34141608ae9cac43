"""A released config with small sizes: a rule by the names of keys, so that what its file asks for runs in a test.

Counts of heads keep what they have in common (one KV head, as many as query heads), lists by layer their last
entries, so that every kind of layer that alternates is there; positions, windows and scalings stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.released.released import Data

LAYERS, HEADS, HEAD_DIM, VOCAB = 8, 4, 16, 96
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "index_n_heads")
_HEAD_DIMS = (
    *("head_dim", "attention_head_dim", "global_head_dim", "index_head_dim", "v_head_dim"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("mamba_head_dim", "mamba_d_head"),
)
_WIDTHS = (
    *("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_intermediate_size"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("block_ff_dim", "encoder_ffn_dim", "decoder_ffn_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank"),
)
_MOST: Data = {
    **dict.fromkeys(_HEADS, HEADS),
    **dict.fromkeys(_HEAD_DIMS, HEAD_DIM),
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 16),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "linear_num_key_heads", "n_groups", "o_groups"), 2),
    "hidden_size_per_layer_input": 8,
    "linear_num_value_heads": HEADS,
    "mamba_d_ssm": 8 * HEAD_DIM,
    "max_source_positions": 30,
    "num_hidden_layers": LAYERS,
    "num_kv_shared_layers": 2,
    "num_mel_bins": 8,
    "rotary_dim": HEAD_DIM // 2,
    "vocab_size_per_layer_input": VOCAB,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MROPE = {True: [4, 2, 2], False: [2, 3, 3]}


def shrunk(data: Data) -> Data:
    """`data` of a size that runs in a test; its special tokens are the architecture's."""
    kept = {key: value for key, value in data.items() if key not in _TOKENS}
    if "text_config" in kept:
        return {**kept, "text_config": shrunk(kept["text_config"])}
    return {**{key: _small(key, value, data) for key, value in kept.items()}, "vocab_size": VOCAB}


def _small(key: str, value: Any, data: Data) -> Any:
    if isinstance(value, Mapping):
        return _small_object(value, data.get("partial_rotary_factor", 1.0))
    if isinstance(value, list | str):
        is_by_layer = key == "hybrid_override_pattern" or len(value) == data.get("num_hidden_layers")
        return value[-LAYERS:] if is_by_layer else value
    if key == "num_key_value_heads":
        return {1: 1, data["num_attention_heads"]: HEADS}.get(value, 2)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return min(value, _MOST[key]) if is_count and key in _MOST else value


def _small_object(given: Mapping[str, Any], rotated: float) -> Data:
    """A rotary embedding with a factor for each pair that is left; layers of Kimi Linear that are left."""
    small = dict(given)
    for key in ("long_factor", "short_factor"):
        if key in small:
            small[key] = small[key][: int(HEAD_DIM * rotated) // 2]
    for key in ("full_attn_layers", "kda_layers"):
        if key in small:
            small[key] = [layer for layer in small[key] if layer <= LAYERS]
    if "mrope_section" in small:
        small["mrope_section"] = _MROPE[bool(small.get("mrope_interleaved"))]
    return {key: _MOST[key] if key in ("head_dim",) else value for key, value in small.items()}

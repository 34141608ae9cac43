"""A small config.json of every architecture, with little more than its sizes."""

from __future__ import annotations

import copy
from typing import Any

Data = dict[str, Any]

SIZES: Data = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
}
HEADS: Data = {"head_dim": 16, "sliding_window": 8}
EXPERTS: Data = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: Data = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
INDEXER: Data = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
DELTA: Data = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
SHARED: Data = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
TEXT: dict[str, Data] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 8},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Phi3ForCausalLM": {},
    "Gemma2ForCausalLM": HEADS,
    "Gemma3ForCausalLM": HEADS | {"num_hidden_layers": 6},
    "Gemma3nForCausalLM": HEADS | SHARED | {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "Gemma4ForCausalLM": HEADS | SHARED | {"num_hidden_layers": 12, "global_head_dim": 32},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": EXPERTS | {"head_dim": 16},
    "GptOssForCausalLM": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4ForCausalLM": {"intermediate_size_mlp": 40, "num_local_experts": 4, "head_dim": 16},
    "DeepseekV2ForCausalLM": LATENT | {"n_routed_experts": 8, "q_lora_rank": 16},
    "DeepseekV3ForCausalLM": LATENT | {"n_routed_experts": 64, "q_lora_rank": 16},
    "DeepseekV32ForCausalLM": LATENT | INDEXER | {"n_routed_experts": 16, "q_lora_rank": 16},
    "DeepseekV4ForCausalLM": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 2,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 16,
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_state": 8},
    "JambaForCausalLM": {"num_experts": 4},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "Lfm2MoeForCausalLM": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * 2},
    "Lfm3ForCausalLM": HEADS | {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 8},
    "OlmoHybridForCausalLM": {},
    "Qwen3NextForCausalLM": EXPERTS | DELTA,
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": EXPERTS | DELTA,
    "KimiLinearForCausalLM": LATENT | {"num_local_experts": 8},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {"sliding_window": 8},
    "GemmaForCausalLM": {"head_dim": 16},
    "Glm4ForCausalLM": {"head_dim": 16},
    "Glm4MoeForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GlmMoeDsaForCausalLM": LATENT | INDEXER | {"n_routed_experts": 8, "q_lora_rank": 16},
    "GraniteForCausalLM": {},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "Ministral3ForCausalLM": {"head_dim": 16},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {"sliding_window": 8},
    "SmolLM3ForCausalLM": {},
    "WhisperForConditionalGeneration": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "max_source_positions": 30,
        "max_target_positions": 40,
    },
}
INNER: dict[str, Data] = {  # nowhere alone
    "MistralLarge4": LATENT
    | INDEXER
    | {"model_type": "mistral_large4_text", "n_routed_experts": 8, "rope_parameters": {"rope_theta": 10_000.0}},
    "Qwen2_5_VL": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
}
AROUND = {  # around the keys of which text model
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "MistralLarge4ForConditionalGeneration": "MistralLarge4",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VL",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
OF_FAMILY: dict[str, Data] = {  # beside `text_config`, of a size that a model can be made of
    "Gemma3ForConditionalGeneration": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 2},
    },
}
ARCHITECTURES = (*TEXT, *AROUND)
# Left out: sizes that only other keys go by.
WITHOUT = {
    "DeepseekV4ForCausalLM": ("intermediate_size",),
    "Mamba2ForCausalLM": (
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ),
    "NemotronHForCausalLM": ("num_hidden_layers",),
    "WhisperForConditionalGeneration": tuple(SIZES.keys() - {"vocab_size"}),
}


def small_config(architecture: str) -> Data:
    """The content of its config.json."""
    text = SIZES | (TEXT | INNER)[AROUND.get(architecture, architecture)]
    text = copy.deepcopy({key: value for key, value in text.items() if key not in WITHOUT.get(architecture, ())})
    if architecture in TEXT:
        return {**text, "architectures": [architecture]}
    return {**OF_FAMILY.get(architecture, {}), "text_config": text, "architectures": [architecture]}

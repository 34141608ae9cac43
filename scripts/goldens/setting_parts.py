"""Settings of the families that are made of parts of others. No torch.

Flow:    [setting_parts] -> setting_cases.py
"""

from __future__ import annotations

from typing import Any

from scripts.goldens.setting_values import FULL, SLIDING, YARN, With, rope
from scripts.goldens.small_configs import Data

BETA: Data = {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
MINISTRAL_ROPE = rope("yarn", rope_theta=100.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0, **BETA)
BASES_OF_PARTS: dict[str, Data] = {  # beside the small config
    "CohereForCausalLM": {"logit_scale": 0.75},
    "Cohere2ForCausalLM": {"layer_types": [SLIDING, FULL] * 2, "logit_scale": 0.75},
    "Glm4MoeForCausalLM": {
        "use_qk_norm": True,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
    },
    "GraniteForCausalLM": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 8},
    "Ministral3ForCausalLM": {"rope_parameters": MINISTRAL_ROPE},
    "Olmo3ForCausalLM": {"layer_types": [SLIDING, FULL] * 2},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8},
    "Qwen2_5_VLForConditionalGeneration": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "rope_parameters": rope(mrope_section=[2, 1, 1]),
    },
}
_HALF_ROPES = [
    rope(rope_theta=500.0),
    rope(partial_rotary_factor=0.25),
    rope(partial_rotary_factor=1.0),
    YARN | {"partial_rotary_factor": 0.5},
]
OF_PARTS: dict[str, dict[str, list[Any]]] = {  # values of one architecture, as OF_ONE of setting_cases.py
    "Glm4ForCausalLM": {"rope_parameters": _HALF_ROPES},
    "Glm4MoeForCausalLM": {"rope_parameters": _HALF_ROPES, "n_shared_experts": [2]},
    "MiniMaxM2ForCausalLM": {
        "rope_parameters": [rope(rope_theta=500.0), rope(partial_rotary_factor=0.25)],
        "rotary_dim": [4, None],
    },
    "Ministral3ForCausalLM": {
        "rope_parameters": [
            MINISTRAL_ROPE | {"rope_theta": 500.0},
            MINISTRAL_ROPE | {"llama_4_scaling_beta": 0.9},
            MINISTRAL_ROPE | {"original_max_position_embeddings": 8},
            MINISTRAL_ROPE | {"mscale": 0.5},
            rope(**BETA),
            rope(),
            None,
        ],
        "sliding_window": [8],
    },
    "Olmo3ForCausalLM": {
        "rope_parameters": [
            {FULL: rope(rope_theta=500.0), SLIDING: rope(rope_theta=2000.0)},
            {FULL: YARN, SLIDING: rope()},
            {FULL: rope("linear", factor=4.0), SLIDING: rope("linear", factor=2.0)},
            None,
        ],
        "layer_types": [[FULL] * 4, [FULL, SLIDING, SLIDING, FULL], None],
    },
    "SmolLM3ForCausalLM": {
        "no_rope_layers": [[1, 1, 1, 0], [0, 1, 1, 1]],
        "no_rope_layer_interval": [4],
        "layer_types": [[FULL] * 4, [FULL, SLIDING, SLIDING, FULL]],
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "rope_parameters": [
            rope(rope_theta=500.0, mrope_section=[2, 1, 1]),
            rope(mrope_section=[1, 1, 2]),
            YARN | {"mrope_section": [2, 1, 1]},
        ],
        "head_dim": [16],
        "num_attention_heads": [
            With(num_attention_heads=8, rope_parameters=rope(mrope_section=[1, 1, 0])),
        ],
        "hidden_size": [With(hidden_size=48, rope_parameters=rope(mrope_section=[2, 2, 2]))],
    },
}

"""GLM 4 and GLM 4.5: half of each head is rotated; norms around each part, or experts. No jax.

Flow:    config.json -> [Glm4Config, Glm4MoeConfig] -> decoders.parts
Source:  transformers' configuration_{glm4,glm4_moe}.py, whose defaults files on the Hub leave out; arXiv 2508.06471
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.models.configs.deepseek import take_expert_sizes, take_groups
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.parts import PartsConfig, take_biases
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class Glm4Config(PartsConfig):
    """Dense, with norms before and after each part."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "eos_token_id": [151_329, 151_336, 151_338],
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-07,
    }
    parts: ClassVar[Mapping[str, Any]] = {"rope_interleaved": True}

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases, ends of texts, which null is not here, and how much of a head is rotated."""
        biases = take_biases(keys, default=True, on_output=False)
        return biases | {
            "eos_token_ids": fields["eos_token_ids"] or tuple(cls.defaults["eos_token_id"]),
            "rope": take_rope(keys, fields["max_model_len"], partial_rotary_factor=0.5),
        }


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(PartsConfig):
    """Experts as those of DeepSeek V3, but in the first layers."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 1,
        "intermediate_size": 10_944,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    experts: ExpertsConfig
    shared_intermediate_size: int  # of the experts that every token has, as one
    first_expert_layer: int
    num_prediction_layers: int  # after the last, for tokens further on; not computed here
    router_bias: ClassVar[bool] = True  # experts are chosen by score plus a bias

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Tensors of layers that predict further tokens."""
        return tuple(f"layers.{self.num_layers + i}." for i in range(self.num_prediction_layers))

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases, norms, rotation and experts."""
        return take_biases(keys, on_output=False) | {
            "qk_norm": keys.take_flag("use_qk_norm", False),
            "rope": take_rope(keys, fields["max_model_len"], partial_rotary_factor=0.5),
            "experts": ExpertsConfig(
                **take_expert_sizes(keys),
                **take_groups(keys),
                norm_topk=keys.take_flag("norm_topk_prob", True),
                score="sigmoid",
                scale=keys.take_float("routed_scaling_factor", 1.0),
            ),
            "shared_intermediate_size": keys.take_int("n_shared_experts") * keys.take_int("moe_intermediate_size"),
            "first_expert_layer": keys.take_index("first_k_dense_replace"),
            "num_prediction_layers": keys.take_index("num_nextn_predict_layers"),
        }

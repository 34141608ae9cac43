"""MiniMax M2: experts by sigmoid in every layer, norms over all heads of queries and of keys. No jax.

Flow:    config.json -> [MiniMaxM2Config] -> decoders.parts
Source:  transformers' configuration_minimax_m2.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.parts import PartsConfig
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(PartsConfig):
    """`rotary_dim` dimensions of a head are rotated."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 200_034,
        "eos_token_id": 200_020,
        "head_dim": 128,
        "intermediate_size": 1536,
        "max_position_embeddings": 196_608,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "rope_theta": 5_000_000.0,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    parts: ClassVar[Mapping[str, Any]] = {"qk_norm": True, "norms_all_heads": True}
    said_anyway: ClassVar[Mapping[str, Any]] = {
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [
            "attn_type_list",  # of the kinds of an earlier MiniMax, all alike
            "mtp_transformer_layers",
            "num_mtp_modules",
            "router_jitter_noise",  # of training
            "shared_moe_mode",
            "use_mtp",
        ]
    )

    experts: ExpertsConfig

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Rotation and experts."""
        share = keys.take_int("rotary_dim", fields["head_dim"]) / fields["head_dim"]
        return {
            "rope": take_rope(keys, fields["max_model_len"], partial_rotary_factor=share),
            "experts": ExpertsConfig(
                num_experts=keys.take_int("num_local_experts"),
                top_k=keys.take_int("num_experts_per_tok", 8),
                intermediate_size=fields["intermediate_size"],
                norm_topk=True,
                score="sigmoid",
            ),
        }

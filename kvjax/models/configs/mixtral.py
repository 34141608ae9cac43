"""Mixtral: a Mistral whose feed-forward parts are experts. No jax.

Flow:    config.json -> [MixtralConfig] -> decoders.mixtral
Source:  transformers' configuration_mixtral.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.llama import take_window
from kvjax.models.configs.parts.parts import PartsConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(PartsConfig):
    """Experts in every layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }

    ignored_keys: ClassVar[frozenset[str]] = frozenset({"router_jitter_noise"})  # of training

    experts: ExpertsConfig

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Windows and experts."""
        experts = ExpertsConfig(
            num_experts=keys.take_int("num_local_experts", 8),
            top_k=keys.take_int("num_experts_per_tok", 2),
            intermediate_size=fields["intermediate_size"],
            norm_topk=True,
        )
        return take_window(keys, fields["num_layers"]) | {"experts": experts}

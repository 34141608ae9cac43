"""OLMo 2 and OLMo 3: norms behind each part, and over all heads of queries and of keys. No jax.

Flow:    config.json -> [Olmo2Config, Olmo3Config] -> decoders.parts
Source:  transformers' configuration_{olmo2,olmo3}.py, whose defaults files on the Hub leave out; arXiv 2501.00656
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.parts import PartsConfig, take_biases, take_windows
from kvjax.models.configs.rope import take_ropes

_OLMO3_THETA = 500_000.0


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(PartsConfig):
    """Full attention."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "eos_token_id": 50_279,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    parts: ClassVar[Mapping[str, Any]] = {"qk_norm": True, "norms_all_heads": True}


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """Three layers in four slide; scaled rotary embeddings are those of the others."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Olmo2Config.defaults,
        "rope_theta": _OLMO3_THETA,
        "sliding_window": 4096,
    }

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases, windows, and a rotary embedding for each kind of layer."""
        if keys.given("rope_theta") not in (None, _OLMO3_THETA):
            raise ConfigError(
                f"{keys.where}: expected a 'rope_theta' for each kind of layer in 'rope_parameters', got one beside: "
                "versions of transformers take it for all layers or for the full ones alone"
            )
        default = tuple(SLIDING if (i + 1) % 4 else FULL for i in range(fields["num_layers"]))
        ropes = take_ropes(keys, fields["max_model_len"], {FULL: "rope_theta", SLIDING: "rope_theta"})
        return take_biases(keys) | {
            **take_windows(keys, default),
            "rope": ropes[FULL],
            "rope_local": ropes[SLIDING],
        }

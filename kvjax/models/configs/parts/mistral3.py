"""Mistral 3: a Mistral or a Ministral 3, alone or as the language model of an outer config. No jax.

Flow:    config.json -> [Ministral3Config, Mistral3Config] -> decoders.llama
Source:  transformers' configuration_{ministral3,mistral3}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig
from kvjax.models.configs.attention_decoder import TemperatureConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.llama import MistralConfig, take_window
from kvjax.models.configs.parts.parts import PartsConfig
from kvjax.models.configs.rope import take_rope

_OUTER = frozenset(  # keys of the vision model and of what stands behind it
    ["multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"]
)


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(PartsConfig):
    """Queries grow with their position from the length of pretraining on."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    }
    outer_ignored_keys: ClassVar[frozenset[str]] = _OUTER
    tied_by: ClassVar[str] = "outer or text"
    default_rope: ClassVar[Mapping[str, Any]] = {
        "type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Windows, and what the object of the rotary embedding says of that and of scores."""
        given = keys.take_object("rope_parameters") or keys.take_object("rope_scaling") or cls.default_rope
        rope = take_rope(
            keys,
            fields["max_model_len"],
            default=cls.default_rope,
            beside_rope=frozenset(["llama_4_scaling_beta", "max_position_embeddings"]),
        )
        return take_window(keys, fields["num_layers"]) | {"rope": rope, "temperature": _take_temperature(keys, given)}


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(MistralConfig):
    """A Mistral within the outer config, unless its `model_type` is that of a Ministral 3.

    transformers ties the output head where no key says so, unless the checkpoint has one, as those of such files have.
    """

    outer_ignored_keys: ClassVar[frozenset[str]] = _OUTER
    tied_by: ClassVar[str] = Ministral3Config.tied_by

    @classmethod
    def of_file(cls, data: Mapping[str, Any]) -> tuple[type[ModelConfig], Mapping[str, Any]]:
        """The class that the language model's `model_type` asks for."""
        text = data.get("text_config")
        is_newer = isinstance(text, Mapping) and text.get("model_type") == "ministral3"
        return (Ministral3Config if is_newer else cls), data


def _take_temperature(keys: ConfigKeys, rope: Mapping[str, Any]) -> TemperatureConfig | None:
    """What the object of the rotary embedding says of queries; None: nothing."""
    beta, floor = (rope.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if beta is None:
        return None
    if not isinstance(beta, int | float) or not isinstance(floor, int) or floor < 1:
        raise ConfigError(
            f"{keys.where}: expected 'llama_4_scaling_beta' and 'original_max_position_embeddings' as numbers in "
            f"rope_parameters, got {beta!r} and {floor!r}"
        )
    return TemperatureConfig(floor=floor, scale=beta, offset=0)

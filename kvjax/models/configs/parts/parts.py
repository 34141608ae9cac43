"""A family as a row of a table: the values that it fixes, and the few keys that are its own. No jax.

Flow:    ConfigKeys -> [PartsConfig.parse] -> a family's config -> decoders.parts, decoders.llama
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class PartsConfig(AttentionDecoderConfig):
    """Full attention in every layer unless the family says otherwise."""

    parts: ClassVar[Mapping[str, Any]] = {}  # fields that are the same in every model of the family
    said_anyway: ClassVar[Mapping[str, Any]] = {}  # keys of its files that transformers reads nothing from

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        for key, value in cls.said_anyway.items():
            keys.require(key, value)
        fields |= {"layer_types": (FULL,) * fields["num_layers"], **cls.parts}
        own = cls.take_own(keys, fields)
        if "rope" not in own:
            own["rope"] = take_rope(keys, fields["max_model_len"])
        return cls(**fields | own)

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields beside those that every decoder has, `fields`: biases here."""
        del fields
        return take_biases(keys)


def take_windows(keys: ConfigKeys, default: tuple[str, ...]) -> dict[str, Any]:
    """Which layers slide, `default` where the file does not say, and how far; a window that is null is none."""
    window = keys.take_nullable("sliding_window")
    return {
        "layer_types": keys.take_layer_types(default, (FULL, SLIDING)),
        "sliding_window": None if window is None else keys.take_int("sliding_window"),
    }


def take_biases(keys: ConfigKeys, *, default: bool = False, on_output: bool = True) -> dict[str, Any]:
    """`attention_bias`: of queries, keys and values, and of what attention gives if `on_output`."""
    bias = keys.take_flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias and on_output}

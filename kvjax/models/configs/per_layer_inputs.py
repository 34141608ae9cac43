"""Decoders whose tokens have a second, small vector for every layer. No jax.

Flow:    ConfigKeys -> [take_per_layer_fields] -> a family's [PerLayerConfig] -> layers.per_layer_inputs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvjax.models.configs.attention_decoder import AttentionDecoderConfig
from kvjax.models.configs.keys import ConfigKeys


@dataclass(frozen=True, kw_only=True)
class PerLayerConfig(AttentionDecoderConfig):
    """A layer's vector of a token is made of the token and of its embedding."""

    per_layer_vocab_size: int  # ids beyond it have the vectors of id 0
    per_layer_size: int  # of a vector; 0: there are none

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Keys and values of layers that read those of others; checkpoints have them."""
        names = ("k_proj", "k_norm", "v_proj", "v_norm")
        shared = range(self.num_own_layers, self.num_layers)
        return tuple(f"layers.{i}.self_attn.{name}." for i in shared for name in names)


def take_per_layer_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields of `PerLayerConfig`."""
    key = "hidden_size_per_layer_input"
    return {
        "per_layer_vocab_size": keys.take_int("vocab_size_per_layer_input"),
        "per_layer_size": 0 if keys.take_nullable(key) is None else keys.take_index(key),
    }

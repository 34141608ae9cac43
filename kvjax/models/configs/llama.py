"""Llama, and those that are Llamas with biases, windows or fused projections: Qwen2, Mistral, Phi-3. No jax.

Flow:    config.json -> [LlamaConfig] -> decoders.llama
Source:  transformers' configuration_{llama,qwen2,mistral,phi3}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.parts import PartsConfig
from kvjax.models.configs.rope import check_factors, take_rope


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(PartsConfig):
    """Full attention in every layer."""

    defaults: ClassVar[Mapping[str, Any]] = {"bos_token_id": 1, "eos_token_id": 2}
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [
            "is_llama_config",  # of the converter that made SmolLM2; transformers' LlamaConfig has no such field
            "max_sequence_length",  # what `rope_scaling` makes of the other
        ]
    )

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases."""
        return super().take_own(keys, fields) | {"mlp_bias": keys.take_flag("mlp_bias", False)}


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(PartsConfig):
    """Biases on queries, keys and values; layers from `max_window_layers` on may slide."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"dual_chunk_attention_config"}
    )  # transformers has no such chunks

    parts: ClassVar[Mapping[str, Any]] = {"qkv_bias": True}

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Windows."""
        return take_late_windows(keys, fields["num_layers"])


@dataclass(frozen=True, kw_only=True)
class MistralConfig(PartsConfig):
    """Every layer slides where there is a `sliding_window`."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Windows."""
        return take_window(keys, fields["num_layers"])


@dataclass(frozen=True, kw_only=True)
class Phi3Config(PartsConfig):
    """As Mistral, with projections that are fused in the checkpoint, and rotary embeddings of part of a head."""

    defaults: ClassVar[Mapping[str, Any]] = {"bos_token_id": 1, "eos_token_id": 32_000, "rms_norm_eps": 1e-5}
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"embd_pdrop", "resid_pdrop"})  # of training

    said_anyway: ClassVar[Mapping[str, Any]] = {"full_attn_mod": 1, "interpolate_factor": 1}

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Windows and rotation."""
        original = keys.take_int("original_max_position_embeddings", 4096)
        rope = take_rope(keys, fields["max_model_len"], original_max_len=original, partial_rotary_factor=1.0)
        check_factors(rope, fields["head_dim"])
        return take_window(keys, fields["num_layers"]) | {"rope": rope}


def take_window(keys: ConfigKeys, num_layers: int, *, slides: bool = True) -> dict[str, Any]:
    """Layer types where `sliding_window` says of all layers whether they slide; unless `slides`, none does.

    transformers reads no `layer_types` there, so they may only say the same.
    """
    window = keys.take_nullable("sliding_window")
    kind = FULL if window is None or not slides else SLIDING
    return {
        "layer_types": keys.take_layer_types((kind,) * num_layers, (kind,)),
        "sliding_window": None if kind == FULL else keys.take_int("sliding_window"),
    }


def take_late_windows(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    """Layer types where those from `max_window_layers` on slide, if `use_sliding_window` says so at all."""
    slides = keys.take_flag("use_sliding_window", False)
    keys.take("sliding_window", None)
    first = keys.take("max_window_layers", num_layers)
    default = tuple(SLIDING if slides and i >= first else FULL for i in range(num_layers))
    return {
        "layer_types": keys.take_layer_types(default, (FULL, SLIDING)),
        "sliding_window": keys.take_int("sliding_window") if slides else None,
    }

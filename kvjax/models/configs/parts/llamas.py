"""Llamas with a switch or two: SmolLM3, Gemma 1, Granite 3. No jax.

Flow:    config.json -> [SmolLM3Config, GemmaConfig, GraniteConfig] -> decoders.llama
Source:  transformers' configuration_{smollm3,gemma,granite}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import take_rotated
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.parts.parts import PartsConfig, take_biases, take_windows


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(PartsConfig):
    """One layer in four rotates nothing, and slides if any does."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"max_window_layers"})  # transformers' class has no such field

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases, and which layers rotate and which slide."""
        rotated, window = take_rotated(keys, fields["num_layers"]), keys.take_nullable("sliding_window")
        slides = keys.take_flag("use_sliding_window", False) and window is not None
        return {
            **take_biases(keys),
            **take_windows(keys, tuple(SLIDING if slides and not turns else FULL for turns in rotated)),
            "mlp_bias": keys.take_flag("mlp_bias", False),
            "rotated_layers": rotated,
        }


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(PartsConfig):
    """Norms around 1, scaled embeddings; "gelu" is its approximation by tanh, as it is in files of the first days."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"hidden_activation"})  # transformers 5 reads `hidden_act`

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases, and what the sizes decide."""
        keys.refuse("use_bidirectional_attention", "a decoder with a cache is causal")
        act = fields["hidden_act"]
        return take_biases(keys) | {
            "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act,
            "norm_offset": 1.0,
            "embed_scale": fields["hidden_size"] ** 0.5,
        }


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(PartsConfig):
    """Embeddings, residuals, scores and logits are scaled."""

    defaults: ClassVar[Mapping[str, Any]] = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048}

    @classmethod
    def take_own(cls, keys: ConfigKeys, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Biases and scales."""
        del fields
        return take_biases(keys) | {
            "mlp_bias": keys.take_flag("mlp_bias", False),
            "embed_scale": keys.take_float("embedding_multiplier", 1.0),
            "residual_scale": keys.take_float("residual_multiplier", 1.0),
            "sm_scale": keys.take_float("attention_multiplier", 1.0),
            "logit_scale": 1.0 / keys.take_float("logits_scaling", 1.0),
        }

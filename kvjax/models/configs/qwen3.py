"""Qwen3: queries and keys are normed per head; its mixture of experts. No jax.

Flow:    config.json -> [Qwen3Config, Qwen3MoeConfig] -> decoders.qwen3
Source:  transformers' configuration_{qwen3,qwen3_moe}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.experts import APART, ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.llama import take_late_windows, take_window
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(AttentionDecoderConfig):
    """Dense: layers from `max_window_layers` on may slide."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    }

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_qwen3_fields(keys)
        return cls(**fields, **take_late_windows(keys, fields["num_layers"]))


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Experts in the feed-forward part of every layer that is not one of `mlp_only_layers`."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_experts": 128,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
    }

    expert_layouts: ClassVar[tuple[str, ...]] = (APART,)  # that checkpoints have

    experts: ExpertsConfig
    expert_layers: tuple[bool, ...]  # per layer: whether it has experts

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_qwen3_fields(keys)
        keys.take("max_window_layers", None)  # not read: all layers slide, or none
        keys.require("shared_expert_intermediate_size", 0)
        keys.require("use_qk_norm", True)
        slides = keys.take_flag("use_sliding_window", False)
        return cls(**take_expert_fields(keys, fields), **take_window(keys, fields["num_layers"], slides=slides))


def take_expert_fields(keys: ConfigKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` and which layers have what experts."""
    local = keys.take("num_local_experts", None)
    num_experts = keys.take_int("num_experts") if local is None else keys.take_int("num_local_experts")
    step, dense = keys.take_int("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
    keys.take("num_experts", None)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=keys.take_int("num_experts_per_tok", 8),
        intermediate_size=keys.take_int("moe_intermediate_size", 768),
        norm_topk=keys.take_flag("norm_topk_prob", False),
    )
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"]))
    return {**fields, "experts": experts, "expert_layers": layers}


def take_qwen3_fields(keys: ConfigKeys, **rope: Any) -> dict[str, Any]:
    """The fields of Qwen3's layers, without windows and feed-forward part; `rope` is what a file may leave out."""
    fields = take_decoder_fields(keys)
    bias = keys.take_flag("attention_bias", False)
    return {
        **fields,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "rope": take_rope(keys, fields["max_model_len"], **rope),
    }

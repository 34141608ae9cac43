"""Qwen3-Next and Qwen3.5: gated delta nets, every fourth layer attends behind a gate; experts. No jax.

Flow:    config.json -> [Qwen3NextConfig, Qwen3_5Config, Qwen3_5MoeConfig] -> decoders.qwen3_next
Source:  transformers' configuration_{qwen3_next,qwen3_5,qwen3_5_moe}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.delta import DeltaConfig
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.rope import take_rope
from kvjax.models.configs.states import take_state_dtype

_DELTA_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(AttentionDecoderConfig):
    """Qwen3.5: dense feed-forward parts."""

    defaults: ClassVar[Mapping[str, Any]] = _DELTA_DEFAULTS | {"num_key_value_heads": 4}
    ignored_keys: ClassVar[frozenset[str]] = frozenset(["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"])

    delta: DeltaConfig
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()  # per layer: whether it has experts; empty: none has
    shared_intermediate_size: int = 0  # of the part that all tokens share beside the experts

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        return cls(**take_delta_fields(keys))

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` has experts instead of a dense part."""
        return bool(self.expert_layers) and self.expert_layers[layer]


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config):
    """Qwen3.5: experts in every layer."""

    defaults: ClassVar[Mapping[str, Any]] = _DELTA_DEFAULTS | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "intermediate_size": 512,  # of no part; files leave it out
    }

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_delta_fields(keys)
        keys.require("norm_topk_prob", True)
        return cls(**fields, **take_shared_experts(keys), expert_layers=(True,) * fields["num_layers"])


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen3_5Config):
    """Experts in every layer but those of `mlp_only_layers`."""

    defaults: ClassVar[Mapping[str, Any]] = _DELTA_DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10}

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_delta_fields(keys)
        step, dense = keys.take_int("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
        return cls(
            **fields,
            **take_shared_experts(keys),
            expert_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"])),
        )


def take_delta_fields(keys: ConfigKeys) -> dict[str, Any]:
    """All but the experts."""
    fields = take_decoder_fields(keys)
    keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolution
    keys.require("attn_output_gate", True)
    keys.take_choice("output_gate_type", ("swish", "silu"), "swish")  # of what the delta net gives
    bias = keys.take_flag("attention_bias", False)
    interval = keys.take_int("full_attention_interval")
    default = tuple(RECURRENT if (i + 1) % interval else FULL for i in range(fields["num_layers"]))
    delta = DeltaConfig(
        num_key_heads=keys.take_int("linear_num_key_heads"),
        num_value_heads=keys.take_int("linear_num_value_heads"),
        key_dim=keys.take_int("linear_key_head_dim"),
        value_dim=keys.take_int("linear_value_head_dim"),
        num_taps=keys.take_int("linear_conv_kernel_dim", most=MAX_TAPS),
        rule_dtype=take_state_dtype(keys, "mamba_ssm_dtype"),
    )
    return {
        **fields,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "norm_offset": 1.0,
        "output_gate": True,
        "layer_types": keys.take_layer_types(default, (FULL, RECURRENT)),
        "rope": take_rope(keys, fields["max_model_len"], partial_rotary_factor=0.25),
        "state": delta.state,
        "delta": delta,
    }


def take_shared_experts(keys: ConfigKeys) -> dict[str, Any]:
    """The experts, and the part beside them."""
    return {
        "experts": ExpertsConfig(
            num_experts=keys.take_int("num_experts"),
            top_k=keys.take_int("num_experts_per_tok"),
            intermediate_size=keys.take_int("moe_intermediate_size", 512),
            norm_topk=keys.take_flag("norm_topk_prob", True),
        ),
        "shared_intermediate_size": keys.take_int("shared_expert_intermediate_size", 512),
    }

"""Jamba: attention without positions among Mamba layers, experts in every other feed-forward part. No jax.

Flow:    config.json -> [JambaConfig] -> decoders.jamba
Source:  transformers' configuration_jamba.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.mamba import Mamba1Config


@dataclass(frozen=True, kw_only=True)
class JambaConfig(AttentionDecoderConfig):
    """One of every `attn_layer_period` layers attends, one of every `expert_layer_period` has experts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 65_536,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [
            "calc_logits_for_entire_prompt",
            "num_logits_to_keep",
            "use_associative_scan",
            "use_mamba_kernels",
            "use_mambapy",
        ]
    )

    mamba: Mamba1Config
    experts: ExpertsConfig
    expert_layers: tuple[bool, ...]  # per layer: whether it has experts

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolution
        keys.require("mamba_inner_layernorms", True)
        keys.refuse("sliding_window", "attention layers see all")
        mamba = take_mamba1(keys, fields["hidden_size"])
        attends = take_period(keys, "attn_layer", fields["num_layers"])
        num_experts = keys.take_int("num_experts", 16)
        has_experts = take_period(keys, "expert_layer", fields["num_layers"])
        return cls(
            **fields,
            layer_types=tuple(FULL if attention else RECURRENT for attention in attends),
            rope=None,
            state=mamba.state,
            mamba=mamba,
            experts=ExpertsConfig(
                num_experts=num_experts,
                top_k=keys.take_int("num_experts_per_tok", 2),
                intermediate_size=fields["intermediate_size"],
                norm_topk=False,
            ),
            expert_layers=tuple(has and num_experts > 1 for has in has_experts),
        )


def take_mamba1(keys: ConfigKeys, hidden_size: int) -> Mamba1Config:
    """Sizes of the Mamba layers; a rank of "auto" is a sixteenth of the hidden size."""
    rank = keys.take("mamba_dt_rank", "auto")
    return Mamba1Config(
        num_channels=keys.take_int("mamba_expand", 2) * hidden_size,
        state_dim=keys.take_int("mamba_d_state", 16),
        num_taps=keys.take_int("mamba_d_conv", 4, most=MAX_TAPS),
        dt_rank=-(-hidden_size // 16) if rank == "auto" else keys.take_int("mamba_dt_rank"),
        conv_bias=keys.take_flag("mamba_conv_bias", True),
        proj_bias=keys.take_flag("mamba_proj_bias", False),
    )


def take_period(keys: ConfigKeys, name: str, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it is number `{name}_offset` of a run of `{name}_period`."""
    period, offset = keys.take_int(f"{name}_period"), keys.take_index(f"{name}_offset")
    return tuple(i % period == offset for i in range(num_layers))

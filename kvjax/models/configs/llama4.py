"""Llama 4 text: chunked layers with rotary embeddings, full ones without, experts beside a shared one. No jax.

Flow:    config.json -> [Llama4Config] -> decoders.llama4
Source:  transformers' configuration_llama4.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import CHUNKED, FULL
from kvjax.models.configs.attention_decoder import (
    AttentionDecoderConfig,
    TemperatureConfig,
    take_decoder_fields,
    take_rotated,
)
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.rope import take_rope


@dataclass(frozen=True, kw_only=True)
class Llama4Config(AttentionDecoderConfig):
    """Every few layers one sees all and rotates nothing. `intermediate_size` is that of layers without experts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 131_072,
        "vocab_size": 202_048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tied_by: ClassVar[str] = "text"
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"for_llm_compressor", "router_jitter_noise"})  # of training

    experts: ExpertsConfig
    expert_layers: tuple[bool, ...]  # per layer: whether it has experts
    qk_l2_norm: bool  # queries and keys are normed without a weight after their rotation

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        num_layers, bias = fields["num_layers"], keys.take_flag("attention_bias", False)
        is_rotated = take_rotated(keys, num_layers)
        chunk_size = keys.take_nullable("attention_chunk_size")
        default = tuple(CHUNKED if rotated and chunk_size is not None else FULL for rotated in is_rotated)
        tuned = bool(keys.take("attn_temperature_tuning", True))
        temperature = TemperatureConfig(
            floor=keys.take_float("floor_scale", 8192), scale=keys.take_float("attn_scale", 0.1)
        )
        return cls(
            **fields | {"intermediate_size": keys.take_int("intermediate_size_mlp", 16_384)},
            qkv_bias=bias,
            o_bias=bias,
            layer_types=keys.take_layer_types(default, (FULL, CHUNKED)),
            attention_chunk_size=None if chunk_size is None else keys.take_int("attention_chunk_size"),
            rope=take_rope(keys, fields["max_model_len"]),
            rotated_layers=is_rotated,
            qk_l2_norm=keys.take_flag("use_qk_norm", True),
            temperature=temperature if tuned else None,
            experts=ExpertsConfig(
                num_experts=keys.take_int("num_local_experts", 16),
                top_k=keys.take_int("num_experts_per_tok", 1),
                intermediate_size=fields["intermediate_size"],
                norm_topk=False,
                score="sigmoid",
            ),
            expert_layers=_take_expert_layers(keys, num_layers),
        )


def _take_expert_layers(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it has experts: one of `moe_layers`, else every `interleave_moe_layer_step`-th."""
    step = keys.take_int("interleave_moe_layer_step", 1)
    listed = keys.take("moe_layers", None)
    return tuple((i + 1) % step == 0 if listed is None else i in listed for i in range(num_layers))

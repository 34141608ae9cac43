"""Gemma 2 and Gemma 3 text: norms before and after each part, windows in turn with full layers. No jax.

Flow:    config.json -> [Gemma2Config, Gemma3Config] -> decoders.gemma
Source:  transformers' configuration_{gemma2,gemma3}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.rope import take_rope, take_ropes


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(AttentionDecoderConfig):
    """Sliding and full layers in turn, soft caps on attention and on the output."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"sliding_window_size"})  # a copy of `sliding_window`

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        keys.refuse("use_bidirectional_attention", "a decoder with a cache is causal")
        keys.take("hidden_act", None)  # of files older than `hidden_activation`, which goes first
        fields = take_gemma_fields(keys)
        default = tuple(FULL if i % 2 else SLIDING for i in range(fields["num_layers"]))
        return cls(
            **fields,
            layer_types=keys.take_layer_types(default, (FULL, SLIDING)),
            attn_logit_soft_cap=take_soft_cap(keys, "attn_logit_softcapping"),
            rope=take_rope(keys, fields["max_model_len"]),
        )


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(AttentionDecoderConfig):
    """Every `sliding_window_pattern`-th layer is full; sliding ones have a rotary base of their own."""

    counts_scaling: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        keys.refuse("use_bidirectional_attention", "a decoder with a cache is causal")
        keys.refuse("attn_logit_softcapping", "transformers does not apply it in Gemma 3, so its meaning is not known")
        fields = take_gemma_fields(keys)
        pattern = keys.take_int("sliding_window_pattern")
        default = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(fields["num_layers"]))
        thetas = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
        ropes = take_ropes(keys, fields["max_model_len"], thetas)
        return cls(
            **fields,
            layer_types=keys.take_layer_types(default, (FULL, SLIDING)),
            qk_norm=True,
            rope=ropes[FULL],
            rope_local=ropes[SLIDING],
        )


def take_gemma_fields(keys: ConfigKeys) -> dict[str, Any]:
    """What all Gemmas have: norms around 1, scaled embeddings, a scale of scores of their own, a cap on the output."""
    fields = take_decoder_fields(keys, activation_key="hidden_activation")
    bias = keys.take_flag("attention_bias", False)
    return {
        **fields,
        "qkv_bias": bias,
        "o_bias": bias,
        "norm_offset": 1.0,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "sm_scale": keys.take_float("query_pre_attn_scalar") ** -0.5,
        "sliding_window": keys.take_int("sliding_window"),
        "final_logit_soft_cap": take_soft_cap(keys, "final_logit_softcapping"),
    }


def take_soft_cap(keys: ConfigKeys, key: str) -> float | None:
    """A positive number, or None."""
    return keys.take_float(key) if keys.take_nullable(key) is not None else None

"""GPT-OSS: windows in turn with full layers, sinks in every softmax, experts with biases and a clamped gate. No jax.

Flow:    config.json -> [GptOssConfig] -> decoders.gpt_oss
Source:  transformers' configuration_gpt_oss.py, whose defaults files on the Hub leave out; arXiv 2508.10925
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.rope import take_rope

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(AttentionDecoderConfig):
    """Experts in every layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"experts_per_token", "initial_context_length"})  # said twice

    experts: ExpertsConfig
    swiglu_alpha: float  # the gate is x * sigmoid(alpha * x)
    swiglu_limit: float  # the gate is at most this, what it multiplies between this and its negative

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        bias = keys.take_flag("attention_bias", True)
        default = tuple(FULL if i % 2 else SLIDING for i in range(fields["num_layers"]))
        return cls(
            **fields,
            qkv_bias=bias,
            o_bias=bias,
            has_sinks=True,
            layer_types=keys.take_layer_types(default, (FULL, SLIDING)),
            sliding_window=keys.take_int("sliding_window"),
            rope=take_rope(keys, fields["max_model_len"], default=_YARN),
            experts=ExpertsConfig(
                num_experts=keys.take_int("num_local_experts", 128),
                top_k=keys.take_int("num_experts_per_tok", 4),
                intermediate_size=fields["intermediate_size"],
                norm_topk=True,
            ),
            swiglu_alpha=keys.take_float("swiglu_alpha", 1.702),
            swiglu_limit=keys.take_float("swiglu_limit", 7.0),
        )

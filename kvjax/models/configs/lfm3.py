"""LFM3: short convolutions, windows and full attention in turns, norms on both sides of each part. No jax.

Flow:    config.json -> [Lfm3Config] -> decoders.lfm3
Source:  transformers' configuration_lfm3.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.lfm2 import CONV, take_conv_fields, take_mixers
from kvjax.models.configs.rope import take_ropes

_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


@dataclass(frozen=True, kw_only=True)
class Lfm3Config(AttentionDecoderConfig):
    """One of every four layers sees all, one a window, the others convolve, unless `layer_types` says otherwise."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 124_894,
        "eos_token_id": 124_900,
        "conv_L_cache": 7,
        "sliding_window": 256,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}

    num_taps: int  # inputs of a convolution, the token's own included
    conv_bias: bool  # of the convolution and of the projections around it
    has_sandwich_norms: bool  # what a part gives is normed before it is added

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_conv_fields(keys)
        bias = keys.take_flag("attention_bias", False)
        default = tuple(
            FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(fields["num_layers"])
        )
        keys.refuse("rope_scaling", "transformers reads only rope_parameters in LFM3")
        thetas = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
        ropes = take_ropes(keys, fields["max_model_len"], thetas, default=_ROPES)
        return cls(
            **fields,
            qkv_bias=bias,
            o_bias=bias,
            head_gate=keys.take_flag("use_attention_gate", True),
            layer_types=take_mixers(keys, default, (FULL, SLIDING, CONV)),
            sliding_window=keys.take_int("sliding_window"),
            rope=ropes[FULL],
            rope_local=ropes[SLIDING],
            has_sandwich_norms=keys.take_flag("use_sandwich_norm", True),
        )

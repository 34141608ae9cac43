"""Gemma 3n text: several streams of hidden states, small inputs for every layer, layers that share K and V. No jax.

Flow:    config.json -> [Gemma3nConfig] -> decoders.gemma3n
Source:  transformers' configuration_gemma3n.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import take_heads
from kvjax.models.configs.decoder import take_sizes
from kvjax.models.configs.gemma import take_soft_cap
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.per_layer_inputs import PerLayerConfig, take_per_layer_fields
from kvjax.models.configs.rope import take_ropes


@dataclass(frozen=True, kw_only=True)
class AltUpConfig:
    """Hidden states are `num_streams` vectors a token; a layer computes one and predicts the others."""

    num_streams: int
    active: int  # the stream that layers compute
    scales_output: bool  # the active stream is scaled before it meets a layer's own input


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(PerLayerConfig):
    """Every fifth layer is full; the last `num_kv_shared_layers` have no K and V of their own."""

    counts_scaling: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_400,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "altup_active_idx": 0,
        "laurel_rank": 64,
        "intermediate_size": 16_384,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"altup_coef_clip", "query_pre_attn_scalar"})
    altup: AltUpConfig
    laurel_rank: int
    intermediate_sizes: tuple[int, ...]  # per layer; `intermediate_size` divides them all
    sparsities: tuple[float, ...]  # per layer: the share of gates that are 0, if they are normally distributed

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_sizes(keys, activation_key="hidden_activation")
        num_layers, bias = fields["num_layers"], keys.take_flag("attention_bias", False)
        default = tuple(SLIDING if (i + 1) % 5 else FULL for i in range(num_layers))
        thetas = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
        ropes = take_ropes(keys, fields["max_model_len"], thetas)
        intermediate_sizes = _take_each(keys, "intermediate_size", num_layers, int)
        return cls(
            **fields,
            **take_heads(keys, fields["hidden_size"]) | {"sm_scale": 1.0},
            **take_per_layer_fields(keys),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            v_norm=True,
            embed_scale=fields["hidden_size"] ** 0.5,
            layer_types=keys.take_layer_types(default, (FULL, SLIDING)),
            num_shared_layers=keys.take_index("num_kv_shared_layers"),
            sliding_window=keys.take_int("sliding_window"),
            rope=ropes[FULL],
            rope_local=ropes[SLIDING],
            final_logit_soft_cap=take_soft_cap(keys, "final_logit_softcapping"),
            altup=_take_altup(keys),
            laurel_rank=keys.take_int("laurel_rank"),
            intermediate_size=math.gcd(*intermediate_sizes),
            intermediate_sizes=intermediate_sizes,
            sparsities=_take_sparsities(keys, num_layers),
        )


def _take_altup(keys: ConfigKeys) -> AltUpConfig:
    num_streams, active = keys.take_int("altup_num_inputs", 4), keys.take_index("altup_active_idx")
    if active >= num_streams:
        raise ConfigError(f"{keys.where}: expected altup_active_idx below {num_streams}, got {active}")
    return AltUpConfig(
        num_streams=num_streams, active=active, scales_output=keys.take_flag("altup_correct_scale", True)
    )


def _take_sparsities(keys: ConfigKeys, num_layers: int) -> tuple[float, ...]:
    """The sparsity of each layer: where the file says nothing, the first ten of more layers have 0.95."""
    num_sparse = 10 if num_layers > 10 else 0
    if keys.take("activation_sparsity_pattern", None) is None:
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    sparsities = _take_each(keys, "activation_sparsity_pattern", num_layers, float)
    if not all(0 <= sparsity < 1 for sparsity in sparsities):
        raise ConfigError(f"{keys.where}: expected activation_sparsity_pattern in [0, 1), got {list(sparsities)}")
    return sparsities


def _take_each(keys: ConfigKeys, key: str, num_layers: int, kind: type) -> tuple[Any, ...]:
    """A number for each layer, or one for all."""
    value = keys.take(key)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers or any(isinstance(x, bool) or not isinstance(x, (int, kind)) for x in values):
        raise ConfigError(f"{keys.where}: expected {key!r} to be {num_layers} numbers or one, got {value!r}")
    return tuple(map(kind, values))

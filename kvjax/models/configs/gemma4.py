"""Gemma 4 text: heads of full layers are wider, the last layers share K and V, experts beside a dense part. No jax.

Flow:    config.json -> [Gemma4Config] -> decoders.gemma4
Source:  transformers' configuration_gemma4.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, SLIDING
from kvjax.models.configs.attention_decoder import take_decoder_fields
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.gemma import take_soft_cap
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.per_layer_inputs import PerLayerConfig, take_per_layer_fields
from kvjax.models.configs.rope import take_ropes

_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_theta": 10_000.0},
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(PerLayerConfig):
    """Every sixth layer and the last are full."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "num_kv_shared_layers": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    experts: ExpertsConfig | None  # beside the dense part of every layer
    double_wide_shared: bool  # layers that share K and V have feed-forward parts of twice the width

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        bidirectional = keys.take("use_bidirectional_attention", None)
        if bidirectional not in (None, False, "vision"):  # "vision": images only, of which there are none here
            raise ConfigError(
                f"{keys.where}: expected 'use_bidirectional_attention' to be null or 'vision', got {bidirectional!r}: "
                "a decoder with a cache is causal"
            )
        fields = take_decoder_fields(keys, activation_key="hidden_activation")
        bias = keys.take_flag("attention_bias", False)
        default = tuple(SLIDING if (i + 1) % 6 else FULL for i in range(fields["num_layers"]))
        layer_types = (*keys.take_layer_types(default, (FULL, SLIDING))[:-1], FULL)
        heads = fields["num_kv_heads"], fields["head_dim"]
        v_is_k = keys.take_flag("attention_k_eq_v", False)
        keys.refuse("rope_scaling", "transformers reads only rope_parameters in Gemma 4")
        thetas = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
        ropes = take_ropes(keys, fields["max_model_len"], thetas, default=_ROPES)
        return cls(
            **fields | {"sm_scale": 1.0},
            **take_per_layer_fields(keys),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            v_norm=True,
            v_is_k=v_is_k,
            full_heads=_take_full_heads(keys, layer_types, heads, gets_kv_heads=v_is_k),
            embed_scale=fields["hidden_size"] ** 0.5,
            layer_types=layer_types,
            num_shared_layers=keys.take_index("num_kv_shared_layers"),
            sliding_window=keys.take_int("sliding_window"),
            rope=ropes[FULL],
            rope_local=ropes[SLIDING],
            final_logit_soft_cap=take_soft_cap(keys, "final_logit_softcapping"),
            experts=_take_experts(keys),
            double_wide_shared=keys.take_flag("use_double_wide_mlp", False),
        )


def _take_full_heads(
    keys: ConfigKeys, layer_types: tuple[str, ...], heads: tuple[int, int], *, gets_kv_heads: bool
) -> tuple[int, int]:
    """KV heads of full layers and their dimension, where those of others are `heads`.

    Two keys say it, or `per_layer_config`, which has what is not as in other layers by the layer's number.
    """
    num_global = keys.take("num_global_key_value_heads", None)
    is_own = num_global is not None and gets_kv_heads
    num_kv_heads = keys.take_int("num_global_key_value_heads") if is_own else heads[0]
    full_heads = num_kv_heads, keys.take_int("global_head_dim")
    per_layer = keys.take_object("per_layer_config")
    if per_layer is None:
        return full_heads
    where = f"{keys.where}: per_layer_config"
    objects = ConfigKeys(per_layer, {}, where)
    by_layer = dict.fromkeys(range(len(layer_types)), heads) | {
        int(layer): _take_layer_heads(ConfigKeys(objects.take_object(layer) or {}, {}, where), heads)
        for layer in per_layer
    }
    by_kind = [{by_layer[i] for i in by_layer if (i, kind) in enumerate(layer_types)} for kind in (SLIDING, FULL)]
    if len(by_layer) > len(layer_types) or not by_kind[0] <= {heads} or len(by_kind[1]) != 1:
        raise ConfigError(f"{where}: expected the same of each full layer and nothing else, got {dict(per_layer)}")
    (full_heads,) = by_kind[1]
    return full_heads


def _take_layer_heads(keys: ConfigKeys, heads: tuple[int, int]) -> tuple[int, int]:
    """KV heads of a layer and their dimension."""
    num_kv_heads, head_dim = heads
    found = keys.take_int("num_key_value_heads", num_kv_heads), keys.take_int("head_dim", head_dim)
    keys.finish(frozenset())
    return found


def _take_experts(keys: ConfigKeys) -> ExpertsConfig | None:
    """Where `enable_moe_block` says so."""
    sizes = {key: keys.take(key, None) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if not keys.take_flag("enable_moe_block", False):
        return None
    num_experts, top_k, inner = (keys.take_int(key) for key in sizes)
    return ExpertsConfig(num_experts=num_experts, top_k=top_k, intermediate_size=inner, norm_topk=True)

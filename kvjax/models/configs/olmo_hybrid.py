"""OLMo hybrid: gated delta nets, every fourth layer attends; positions are rotated where the file says so. No jax.

Flow:    config.json -> [OlmoHybridConfig] -> decoders.olmo_hybrid
Source:  transformers' configuration_olmo_hybrid.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.delta import DeltaConfig
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.rope import RopeConfig, take_rope


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(AttentionDecoderConfig):
    """Norms stand behind attention and before delta nets."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 100_352,
        "hidden_size": 3840,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65_536,
        "eos_token_id": 100_257,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        [  # how training began
            "linear_a_log_max",
            "linear_a_log_min",
            "linear_dt_init_floor",
            "linear_dt_max",
            "linear_dt_min",
        ]
    )

    delta: DeltaConfig

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolution
        bias, delta = keys.take_flag("attention_bias", False), take_delta(keys, fields)
        default = [FULL if i % 4 == 3 else RECURRENT for i in range(fields["num_layers"])]
        if FULL not in default:
            default[-1] = FULL
        return cls(
            **fields,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            norms_all_heads=True,
            layer_types=keys.take_layer_types(tuple(default), (FULL, RECURRENT)),
            rope=take_rope_or_none(keys, fields["max_model_len"]),
            state=delta.state,
            delta=delta,
        )


def take_delta(keys: ConfigKeys, fields: Mapping[str, Any]) -> DeltaConfig:
    """Sizes of the delta nets; what a file leaves out follows from heads and hidden size."""
    num_key_heads = keys.take_int("linear_num_key_heads", fields["num_q_heads"])
    key_dim = keys.take_int("linear_key_head_dim", int(0.75 * fields["hidden_size"] / num_key_heads))
    return DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=keys.take_int("linear_num_value_heads", fields["num_q_heads"]),
        key_dim=key_dim,
        value_dim=keys.take_int("linear_value_head_dim", 2 * key_dim),
        num_taps=keys.take_int("linear_conv_kernel_dim", 4, most=MAX_TAPS),
        most_written=2.0 if keys.take_flag("linear_allow_neg_eigval", True) else 1.0,
    )


def take_rope_or_none(keys: ConfigKeys, max_len: int) -> RopeConfig | None:
    """The rotary embedding; none where `rope_parameters` says that its `rope_theta` is null, as released files do."""
    parameters = keys.take_object("rope_parameters") or {}
    is_none = "rope_theta" in parameters and parameters["rope_theta"] is None
    return None if is_none else take_rope(keys, max_len)

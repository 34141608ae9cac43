"""Falcon-H1: every layer attends and scans beside, and all that is projected has a multiplier. No jax.

Flow:    config.json -> [FalconH1Config] -> decoders.falcon_h1
Source:  transformers' configuration_falcon_h1.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.config import FULL
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.mamba import Mamba2Config, take_mamba2
from kvjax.models.configs.rope import take_rope
from kvjax.models.configs.states import StateShapes


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(AttentionDecoderConfig):
    """The multiplier of keys is in the scale of scores."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mamba_d_ssm": 1024,
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        ["mamba_chunk_size", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep"]
    )

    mamba: Mamba2Config
    states: StateShapes  # of every layer
    attention_scales: tuple[float, float]  # of what attention takes and gives
    mamba_scales: tuple[float, float]  # of what the Mamba part takes and gives
    mlp_scales: tuple[float, float]  # of the gate before its activation, and of what the feed-forward part gives

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolution
        bias, mamba = keys.take_flag("attention_bias", False), take_scan(keys, fields["hidden_size"])
        return cls(
            **fields
            | {
                "embed_scale": keys.take_float("embedding_multiplier", 1.0),
                "sm_scale": fields["sm_scale"] * keys.take_float("key_multiplier", 1.0),
                "logit_scale": keys.take_float("lm_head_multiplier", 1.0),
            },
            mlp_bias=keys.take_flag("mlp_bias", False),
            qkv_bias=bias,
            o_bias=bias,
            layer_types=(FULL,) * fields["num_layers"],
            rope=take_rope(keys, fields["max_model_len"]),
            mamba=mamba,
            states=mamba.state,
            attention_scales=_take_pair(keys, "attention_in_multiplier", "attention_out_multiplier"),
            mamba_scales=_take_pair(keys, "ssm_in_multiplier", "ssm_out_multiplier"),
            mlp_scales=take_scales(keys, "mlp_multipliers", 2),
        )

    @property
    def cache_words(self) -> str:
        """Heads of a layer, beside which is a state."""
        return f"{self.num_kv_heads} KV heads of {self.head_dim} and a state in each layer"

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """K and V of layer i, `layers.{i}`, and its state, `layers.{i}.mamba`."""
        specs: dict[str, KVCacheSpec] = {}
        for name, spec in super().kv_cache_specs(block_size, dtype).items():
            token_bytes = spec.page_size_bytes // spec.block_size
            state = self.states.spec(spec.block_size, token_bytes, self.dtype)
            specs |= {name: spec, f"{name}.mamba": state}
        return specs

    def splits_cache(self, num_shards: int) -> bool:
        """Whether every device can have whole KV heads, and whole heads and channels of states."""
        return super().splits_cache(num_shards) and self.states.splits(num_shards)


def take_scan(keys: ConfigKeys, hidden_size: int) -> Mamba2Config:
    """Sizes of the Mamba part, whose inputs are scaled one by one."""
    inner = keys.take_int("mamba_expand", 2) * hidden_size
    if keys.take_nullable("mamba_d_ssm") is not None:
        inner = keys.take_int("mamba_d_ssm")
    return replace(
        take_mamba2(keys, inner, "mamba_d_ssm"),
        out_bias=keys.take_flag("projectors_bias", False),
        in_scales=take_scales(keys, "ssm_multipliers", 5),
        has_norm=keys.take_flag("mamba_rms_norm", False),
        gate_first=not keys.take_flag("mamba_norm_before_gate", True),
    )


def take_scales(keys: ConfigKeys, key: str, count: int) -> tuple[Any, ...]:  # float, `count` times
    """A list of positive numbers; without it all are 1."""
    given = keys.take(key, [1.0] * count)
    is_list = isinstance(given, list | tuple) and len(given) == count
    if not is_list or any(isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < 1e30 for x in given):
        raise ConfigError(f"{keys.where}: expected {key!r} to be {count} positive numbers, got {given!r:.80}")
    return tuple(map(float, given))


def _take_pair(keys: ConfigKeys, *names: str) -> tuple[float, float]:
    first, second = (keys.take_float(name, 1.0) for name in names)
    return first, second

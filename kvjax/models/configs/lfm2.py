"""LFM2: gated short convolutions among attention layers, dense or with experts. No jax.

Flow:    config.json -> [Lfm2Config, Lfm2MoeConfig] -> decoders.lfm2
Source:  transformers' configuration_{lfm2,lfm2_moe}.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.errors import ConfigError
from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.rope import take_rope
from kvjax.models.configs.states import StateShapes

CONV = "conv"  # in `layer_types`
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "conv_L_cache": 3,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of released files, beside what transformers reads: sizes that others say, and how training began.
_IGNORED = frozenset(
    [
        "block_dim",
        "block_mlp_init_scale",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
        "theta",
        "use_pos_enc",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(AttentionDecoderConfig):
    """`layer_types` or `full_attn_idxs` say which layers attend; the others convolve."""

    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS | {"hidden_size": 2560, "intermediate_size": 12_288}
    ignored_keys: ClassVar[frozenset[str]] = _IGNORED

    num_taps: int  # inputs of a convolution, the token's own included
    conv_bias: bool  # of the convolution and of the projections around it
    experts: ExpertsConfig | None = None
    num_dense_layers: int = 0  # the first ones, whose feed-forward parts have no experts
    has_expert_bias: bool = False  # experts are chosen by score plus bias

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_lfm2_fields(keys)
        return cls(**fields | {"intermediate_size": take_width(keys)})

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` has experts instead of a dense part."""
        return self.experts is not None and layer >= self.num_dense_layers


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """Experts in all layers but the first."""

    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_dense_layers": 2,
    }
    ignored_keys: ClassVar[frozenset[str]] = _IGNORED | {"full_attn_idxs"}

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        keys.take("layer_types")  # which has no default
        return cls(
            **take_lfm2_fields(keys),
            experts=ExpertsConfig(
                num_experts=keys.take_int("num_experts", 32),
                top_k=keys.take_int("num_experts_per_tok", 4),
                intermediate_size=keys.take_int("moe_intermediate_size", 1792),
                norm_topk=keys.take_flag("norm_topk_prob", True),
                norm_eps=1e-6,
                score="sigmoid",
                scale=keys.take_float("routed_scaling_factor", 1.0),
            ),
            num_dense_layers=keys.take_index("num_dense_layers"),
            has_expert_bias=keys.take_flag("use_expert_bias", True),
        )


def take_lfm2_fields(keys: ConfigKeys) -> dict[str, Any]:
    """All but the feed-forward parts."""
    fields = take_conv_fields(keys)
    attends = tuple(range(fields["num_layers"]))
    if keys.given("full_attn_idxs") is not None:
        attends = keys.take_ints("full_attn_idxs")
    default = tuple(FULL if i in attends else CONV for i in range(fields["num_layers"]))
    return fields | {
        "layer_types": take_mixers(keys, default, (FULL, CONV)),
        "rope": take_rope(keys, fields["max_model_len"]),
    }


def take_conv_fields(keys: ConfigKeys) -> dict[str, Any]:
    """What layers have in LFM2 and LFM3; `tie_embedding` goes before `tie_word_embeddings`."""
    fields = take_decoder_fields(keys)
    num_taps = keys.take_int("conv_L_cache", most=MAX_TAPS)
    if num_taps < 2:
        raise ConfigError(
            f"{keys.where}: expected 'conv_L_cache' of at least 2, got {num_taps}: a convolution of a token alone has "
            "no state"
        )
    return fields | {
        "rms_norm_eps": keys.take_float("norm_eps", 1e-5),
        "hidden_act": "silu",
        "tie_word_embeddings": keys.take_flag("tie_embedding", fields["tie_word_embeddings"]),
        "qk_norm": True,
        "state": StateShapes(((fields["hidden_size"], num_taps - 1),), (None,)),
        "num_taps": num_taps,
        "conv_bias": keys.take_flag("conv_bias", False),
    }


def take_mixers(keys: ConfigKeys, default: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one of `known` for each layer: which attend how, and which convolve."""
    return tuple(RECURRENT if name == CONV else name for name in keys.take_layer_types(default, known))


def take_width(keys: ConfigKeys) -> int:
    """Columns of the dense parts: what the file says, or two thirds of it, scaled and rounded up to a multiple."""
    width = keys.take_int("block_ff_dim", keys.take_int("intermediate_size"))
    multiple, scale = keys.take_int("block_multiple_of", 256), keys.take_float("block_ffn_dim_multiplier", 1.0)
    if not keys.take_flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(scale * int(2 * width / 3)) // multiple) * multiple

"""Granite 4.0: Mamba 2 among attention layers, multipliers, experts beside a part that all tokens share. No jax.

Flow:    config.json -> [GraniteMoeHybridConfig] -> decoders.granite_moe_hybrid
Source:  transformers' configuration_granitemoehybrid.py, whose defaults files on the Hub leave out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig, take_decoder_fields
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.mamba import Mamba2Config, take_mamba2
from kvjax.models.configs.rope import take_rope

_LAYER_TYPES = {"mamba": RECURRENT, "attention": FULL, RECURRENT: RECURRENT, FULL: FULL}


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(AttentionDecoderConfig):
    """`layer_types` says which layers attend; without experts the shared part is alone."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_multiplier": 1.0,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "normalization_function": "rmsnorm",
    }
    ignored_keys: ClassVar[frozenset[str]] = frozenset(["init_method", "mamba_chunk_size"])

    mamba: Mamba2Config
    experts: ExpertsConfig | None
    shared_intermediate_size: int

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        fields = take_decoder_fields(keys)
        keys.take_choice("hidden_act", ("silu",), "silu")  # what follows the convolution
        keys.take_choice("normalization_function", ("rmsnorm",))
        bias, multiplier = keys.take_flag("attention_bias", False), keys.take_nullable("attention_multiplier")
        inner = keys.take_int("mamba_expand", 2) * fields["hidden_size"]
        mamba = take_mamba2(keys, inner, "mamba_expand * hidden_size")
        rope = take_rope(keys, fields["max_model_len"])
        return cls(
            **fields
            | {
                "embed_scale": keys.take_float("embedding_multiplier", 1.0),
                "sm_scale": fields["sm_scale"] if multiplier is None else keys.take_float("attention_multiplier"),
                "logit_scale": 1.0 / keys.take_float("logits_scaling", 1.0),
            },
            qkv_bias=bias,
            o_bias=bias,
            layer_types=take_mixers(keys, fields["num_layers"]),
            rope=rope if keys.take("position_embedding_type", None) == "rope" else None,
            state=mamba.state,
            mamba=mamba,
            experts=take_experts(keys, fields["intermediate_size"]),
            shared_intermediate_size=keys.take_int("shared_intermediate_size", 1024),
            residual_scale=keys.take_float("residual_multiplier", 1.0),
        )


def take_mixers(keys: ConfigKeys, num_layers: int) -> tuple[str, ...]:
    """`layer_types` in the names of newer or older files; without them no layer attends."""
    names = keys.take_layer_types((RECURRENT,) * num_layers, tuple(_LAYER_TYPES))
    return tuple(_LAYER_TYPES[name] for name in names)


def take_experts(keys: ConfigKeys, intermediate_size: int) -> ExpertsConfig | None:
    """None where there are no experts. A softmax over the chosen ones is one over all whose weights sum up to 1."""
    top_k = keys.take("num_experts_per_tok", 2)
    if keys.take("num_local_experts", 8) == 0:
        return None
    return ExpertsConfig(
        num_experts=keys.take_int("num_local_experts", 8),
        top_k=top_k,
        intermediate_size=intermediate_size,
        norm_topk=True,
    )

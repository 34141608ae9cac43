"""LFM2, dense and with experts.

Flow:    Lfm2Config, Lfm2MoeConfig -> [Lfm2Decoder]
Source:  transformers' modeling_{lfm2,lfm2_moe}.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.config import RECURRENT
from kvjax.models.configs.experts import APART, ROWS
from kvjax.models.configs.lfm2 import Lfm2Config
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.short_conv import ShortConv
from kvjax.models.tensor_sources import TensorSource, Whole

_TENSOR_NAMES = {"mlp": "feed_forward", "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
_PROJECTIONS = ("w1", "w3", "w2")  # gate, up and down


class AttentionBlock(PreNormBlock):
    """Attention and a feed-forward part."""

    tensor_names: ClassVar[Mapping[str, str]] = _TENSOR_NAMES


class ConvBlock(PreNormBlock):
    """A short convolution and a feed-forward part."""

    tensor_names: ClassVar[Mapping[str, str]] = _TENSOR_NAMES | {"self_attn": "conv"}


class Lfm2Attention(Attention):
    """Norms and the output have names of their own in checkpoints."""

    tensor_names: ClassVar[Mapping[str, str]] = {
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
    }


class Lfm2FeedForward(FeedForward):
    """Projections are numbered in checkpoints."""

    tensor_names: ClassVar[Mapping[str, str]] = dict(
        zip(("gate_proj", "up_proj", "down_proj"), _PROJECTIONS, strict=True)
    )


class Lfm2Experts(SparseFeedForward):
    """The bias by which experts are chosen stands beside the router in checkpoints."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """The source of the bias."""
        return {"gate.e_score_correction_bias": Whole("expert_bias")}


def feed_forward_part(config: Lfm2Config, layer: int, make: Make) -> Lfm2FeedForward | Lfm2Experts:
    """The dense part of layer `layer`, or its experts."""
    size, act = config.hidden_size, config.hidden_act
    if config.experts is None or not config.has_experts(layer):
        return Lfm2FeedForward(size, config.intermediate_size, activation=act, make=make)
    return Lfm2Experts(
        size,
        config.experts,
        activation=act,
        make=make,
        names=_PROJECTIONS,
        layouts=(APART, ROWS),
        has_bias=config.has_expert_bias,
    )


class Lfm2Decoder(Decoder):
    """A short convolution or attention, then a dense part or experts, each behind a norm."""

    tensor_names: ClassVar[Mapping[str, str]] = {"norm": "embedding_norm"}

    @staticmethod
    def make_layer(config: Lfm2Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = feed_forward_part(config, layer, make)
        if config.layer_types[layer] == RECURRENT:
            conv = ShortConv(config.hidden_size, config.num_taps, layer, bias=config.conv_bias, make=make)
            return ConvBlock(config, make, self_attn=conv, mlp=mlp)
        return AttentionBlock(config, make, self_attn=Lfm2Attention(config, layer, make), mlp=mlp)

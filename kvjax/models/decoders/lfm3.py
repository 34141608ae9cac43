"""LFM3.

Flow:    Lfm3Config -> [Lfm3Decoder]
Source:  transformers' modeling_lfm3.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.config import RECURRENT
from kvjax.models.configs.lfm3 import Lfm3Config
from kvjax.models.decoders.lfm2 import AttentionBlock, ConvBlock, Lfm2FeedForward
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import SandwichNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.short_conv import ShortConv

_TENSOR_NAMES = {
    "mlp": "feed_forward",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "post_operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}


class AttentionSandwich(SandwichNormBlock):
    """Attention and a feed-forward part, each between two norms."""

    tensor_names: ClassVar[Mapping[str, str]] = _TENSOR_NAMES


class ConvSandwich(SandwichNormBlock):
    """A short convolution and a feed-forward part, each between two norms."""

    tensor_names: ClassVar[Mapping[str, str]] = _TENSOR_NAMES | {"self_attn": "conv"}


class Lfm3Decoder(Decoder):
    """A short convolution or attention, then a dense part."""

    tensor_names: ClassVar[Mapping[str, str]] = {"norm": "embedding_norm"}

    @staticmethod
    def make_layer(config: Lfm3Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        size, has_norms = config.hidden_size, config.has_sandwich_norms
        mlp = Lfm2FeedForward(size, config.intermediate_size, activation=config.hidden_act, make=make)
        if config.layer_types[layer] == RECURRENT:
            conv = ShortConv(size, config.num_taps, layer, bias=config.conv_bias, make=make)
            return (ConvSandwich if has_norms else ConvBlock)(config, make, self_attn=conv, mlp=mlp)
        attention = Attention(config, layer, make)
        return (AttentionSandwich if has_norms else AttentionBlock)(config, make, self_attn=attention, mlp=mlp)

"""Qwen3, dense and with experts.

Flow:    Qwen3Config, Qwen3MoeConfig -> [Qwen3Decoder, Qwen3MoeDecoder]
Source:  transformers' modeling_{qwen3,qwen3_moe}.py, with whose outputs they agree
"""

from __future__ import annotations

from flax import nnx

from kvjax.models.configs.qwen3 import Qwen3MoeConfig
from kvjax.models.decoders.llama import LlamaDecoder, dense_part
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make


class Qwen3Decoder(LlamaDecoder):
    """As Llama, but that its config asks for normed queries and keys."""


class Qwen3MoeDecoder(Decoder):
    """As Qwen3, with experts in the feed-forward part of most layers."""

    @staticmethod
    def make_layer(config: Qwen3MoeConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp: FeedForward | SparseFeedForward
        if config.expert_layers[layer]:
            mlp = SparseFeedForward(
                config.hidden_size,
                config.experts,
                activation=config.hidden_act,
                make=make,
                layouts=config.expert_layouts,
            )
        else:
            mlp = dense_part(config, make)
        return PreNormBlock(config, make, self_attn=Attention(config, layer, make), mlp=mlp)

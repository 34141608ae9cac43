"""Llama and its kin: Qwen2, Mistral; Phi-3, whose checkpoints fuse projections.

Flow:    LlamaConfig -> [LlamaDecoder, Phi3Decoder]
Source:  transformers' modeling_{llama,qwen2,mistral,phi3}.py, with whose outputs they agree
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.configs.attention_decoder import AttentionDecoderConfig
from kvjax.models.configs.decoder import DecoderConfig
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import Block, PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make
from kvjax.models.tensor_sources import Part, TensorSource


class LlamaDecoder(Decoder):
    """Attention and a gated feed-forward part, each behind a norm; others have another `block` around both."""

    block: ClassVar[type[Block]] = PreNormBlock

    @classmethod
    def make_layer(cls, config: AttentionDecoderConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return cls.block(config, make, self_attn=Attention(config, layer, make), mlp=dense_part(config, make))


def dense_part(config: DecoderConfig, make: Make) -> FeedForward:
    """The feed-forward part without experts."""
    return FeedForward(
        config.hidden_size, config.intermediate_size, activation=config.hidden_act, bias=config.mlp_bias, make=make
    )


class FusedAttention(Attention):
    """Queries, keys and values are one tensor of the checkpoint."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Where each projection lies in `qkv_proj`."""
        q, kv = self.q_proj.out_features, self.k_proj.out_features
        starts = {"q_proj": 0, "k_proj": q, "v_proj": q + kv}
        return {f"{name}.kernel": Part("qkv_proj.weight", start, q + 2 * kv) for name, start in starts.items()}


class FusedFeedForward(FeedForward):
    """Gate and up are one tensor of the checkpoint."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Where each projection lies in `gate_up_proj`."""
        inner = self.gate_proj.out_features
        starts = {"gate_proj": 0, "up_proj": inner}
        return {f"{name}.kernel": Part("gate_up_proj.weight", start, 2 * inner) for name, start in starts.items()}


class Phi3Decoder(Decoder):
    """As Llama."""

    @staticmethod
    def make_layer(config: AttentionDecoderConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = FusedFeedForward(config.hidden_size, config.intermediate_size, activation=config.hidden_act, make=make)
        return PreNormBlock(config, make, self_attn=FusedAttention(config, layer, make), mlp=mlp)

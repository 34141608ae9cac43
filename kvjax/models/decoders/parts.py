"""Families made of parts that others have: a block, a feed-forward part, and the names of their tensors.

Flow:    PartsConfig -> [a decoder] -> layers
Source:  transformers' modeling_{olmo2,olmo3,glm4,glm4_moe,cohere,cohere2,minimax_m2}.py, with whose outputs they agree
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from kvjax.models.configs.parts.glm import Glm4MoeConfig
from kvjax.models.configs.parts.minimax_m2 import MiniMaxM2Config
from kvjax.models.decoders.deepseek import feed_forward_part
from kvjax.models.decoders.llama import FusedFeedForward, LlamaDecoder
from kvjax.models.decoders.mixtral import MixtralBlock
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import Block, ParallelBlock, PostNormBlock, PreNormBlock, SandwichNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.make import Make
from kvjax.models.tensor_sources import TensorSource, Whole


class OlmoDecoder(LlamaDecoder):
    """OLMo 2 and OLMo 3."""

    block: ClassVar[type[Block]] = PostNormBlock


class CohereDecoder(LlamaDecoder):
    """Command R, with windows or without."""

    block: ClassVar[type[Block]] = ParallelBlock


class Glm4Block(SandwichNormBlock):
    """The checkpoint's name of the third norm is that of the second here."""

    tensor_names: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }


class Glm4Decoder(Decoder):
    """GLM 4."""

    @staticmethod
    def make_layer(config: Any, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = FusedFeedForward(config.hidden_size, config.intermediate_size, activation=config.hidden_act, make=make)
        return Glm4Block(config, make, self_attn=Attention(config, layer, make), mlp=mlp)


class Glm4MoeDecoder(Decoder):
    """GLM 4.5 and what follows it."""

    @staticmethod
    def make_layer(config: Glm4MoeConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = feed_forward_part(config, layer, make)
        return PreNormBlock(config, make, self_attn=Attention(config, layer, make), mlp=mlp)


class MiniMaxM2FeedForward(SparseFeedForward):
    """What is added to scores stands beside the router."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Where it stands."""
        return {"gate.e_score_correction_bias": Whole("e_score_correction_bias")}


class MiniMaxM2Decoder(Decoder):
    """MiniMax M2."""

    @staticmethod
    def make_layer(config: MiniMaxM2Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = MiniMaxM2FeedForward(
            config.hidden_size,
            config.experts,
            activation=config.hidden_act,
            make=make,
            names=("w1", "w3", "w2"),
            has_bias=True,
        )
        return MixtralBlock(config, make, self_attn=Attention(config, layer, make), mlp=mlp)

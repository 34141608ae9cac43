"""DeepSeek V2 and V3.

Flow:    DeepseekV2Config, DeepseekV3Config -> [DeepseekDecoder]
Source:  transformers' modeling_deepseek_{v2,v3}.py, with whose outputs it agrees
"""

from __future__ import annotations

from flax import nnx

from kvjax.models.configs.deepseek import DeepseekConfig
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.latent_attention import LatentAttention
from kvjax.models.layers.make import Make


class DeepseekDecoder(Decoder):
    """Latent attention, and experts but in the first layers."""

    @staticmethod
    def make_layer(config: DeepseekConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        attention = LatentAttention(config.hidden_size, config.attention, f"layers.{layer}", make)
        is_dense = layer < config.first_expert_layer
        mlp = dense_part(config, make) if is_dense else _expert_part(config, make)
        return PreNormBlock(config, make, self_attn=attention, mlp=mlp)


def _expert_part(config: DeepseekConfig, make: Make) -> SparseFeedForward:
    size, activation = config.hidden_size, config.hidden_act
    shared = config.shared_intermediate_size
    return SparseFeedForward(
        size,
        config.experts,
        activation=activation,
        make=make,
        has_bias=config.router_bias,
        shared_experts=FeedForward(size, shared, activation=activation, make=make, bias=config.mlp_bias)
        if shared
        else None,
    )

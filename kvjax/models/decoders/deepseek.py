"""DeepSeek V2 and V3.

Flow:    DeepseekV2Config, DeepseekV3Config -> [DeepseekDecoder]
Source:  transformers' modeling_deepseek_{v2,v3}.py, with whose outputs it agrees
"""

from __future__ import annotations

from flax import nnx

from kvjax.models.configs.deepseek import DeepseekConfig
from kvjax.models.configs.parts.glm import Glm4MoeConfig
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.attention.latent import LatentAttention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make


class DeepseekDecoder(Decoder):
    """Latent attention, and experts but in the first layers."""

    @staticmethod
    def make_layer(config: DeepseekConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        attention = LatentAttention(config.hidden_size, config.attention, f"layers.{layer}", make)
        mlp = feed_forward_part(config, layer, make)
        return PreNormBlock(config, make, self_attn=attention, mlp=mlp)


def feed_forward_part(
    config: DeepseekConfig | Glm4MoeConfig,
    layer: int,
    make: Make,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),  # of an expert's tensors
) -> FeedForward | SparseFeedForward:
    """A dense part in the first layers, experts and a shared part in the others."""
    if layer < config.first_expert_layer:
        return dense_part(config, make)
    size, activation = config.hidden_size, config.hidden_act
    shared = config.shared_intermediate_size
    return SparseFeedForward(
        size,
        config.experts,
        activation=activation,
        make=make,
        names=names,
        has_bias=config.router_bias,
        shared_experts=FeedForward(size, shared, activation=activation, make=make, bias=config.mlp_bias)
        if shared
        else None,
    )

"""DeepSeek V2, V3 and V3.2, and GLM 5.

Flow:    DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig -> [DeepseekDecoder]
Source:  transformers' modeling_deepseek_{v2,v3,v32}.py and modeling_glm_moe_dsa.py, with whose outputs it agrees
"""

from __future__ import annotations

from flax import nnx

from kvjax.models.configs.deepseek import DeepseekConfig
from kvjax.models.configs.parts.glm import Glm4MoeConfig
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.attention.latent import LatentAttention
from kvjax.models.layers.attention.token_indexer import TokenIndexer
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make


class DeepseekDecoder(Decoder):
    """Latent attention, of all tokens or those that an indexer picks; experts but in the first layers."""

    @staticmethod
    def make_layer(config: DeepseekConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        attention = LatentAttention(
            config.hidden_size, config.attention, f"layers.{layer}", make, indexer=indexer_part(config, layer, make)
        )
        mlp = feed_forward_part(config, layer, make)
        return PreNormBlock(config, make, self_attn=attention, mlp=mlp)


def indexer_part(config: DeepseekConfig, layer: int, make: Make) -> TokenIndexer | None:
    """The layer's indexer, if it has one."""
    attention = config.attention
    if attention.indexer is None or layer not in config.indexed_layers:
        return None
    size = config.hidden_size
    return TokenIndexer(size, attention.query_rank or size, attention.indexer, f"layers.{layer}", make)


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

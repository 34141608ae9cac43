"""Gemma 2 and Gemma 3 text.

Flow:    Gemma2Config, Gemma3Config -> [GemmaDecoder]
Source:  transformers' modeling_{gemma2,gemma3}.py, with whose outputs it agrees
"""

from __future__ import annotations

from flax import nnx

from kvjax.models.configs.attention_decoder import AttentionDecoderConfig
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import SandwichNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.make import Make


class GemmaDecoder(Decoder):
    """Norms before and after each part; what else differs, the config says."""

    @staticmethod
    def make_layer(config: AttentionDecoderConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return SandwichNormBlock(config, make, self_attn=Attention(config, layer, make), mlp=dense_part(config, make))

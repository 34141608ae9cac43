"""Kimi Linear.

Flow:    KimiLinearConfig -> [KimiLinearDecoder]
Source:  transformers' modeling_kimi_linear.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.config import FULL
from kvjax.models.configs.kimi_linear import KimiLinearConfig
from kvjax.models.decoders.deepseek import feed_forward_part
from kvjax.models.layers.attention.latent import LatentAttention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.delta import KimiDeltaAttention


class KimiLinearDecoder(Decoder):
    """Kimi Delta Attention or latent attention, then a dense part or experts, each behind a norm."""

    tensor_renames: ClassVar[Mapping[str, str]] = {r"\.block_sparse_moe\.": ".mlp."}

    @staticmethod
    def make_layer(config: KimiLinearConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        size = config.hidden_size
        mlp = feed_forward_part(config, layer, make, names=("w1", "w3", "w2"))
        if config.layer_types[layer] == FULL:
            attention = LatentAttention(size, config.attention, f"layers.{layer}", make)
            return PreNormBlock(config, make, self_attn=attention, mlp=mlp)
        delta = KimiDeltaAttention(size, config.kda, layer, eps=config.rms_norm_eps, make=make)
        return PreNormBlock(config, make, self_attn=delta, mlp=mlp)

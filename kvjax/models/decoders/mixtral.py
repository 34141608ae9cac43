"""Mixtral.

Flow:    MixtralConfig -> [MixtralDecoder]
Source:  transformers' modeling_mixtral.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.configs.mixtral import MixtralConfig
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.make import Make


class MixtralBlock(PreNormBlock):
    """Its feed-forward part has a name of its own in checkpoints."""

    tensor_names: ClassVar[Mapping[str, str]] = {"mlp": "block_sparse_moe"}


class MixtralDecoder(Decoder):
    """Attention and experts, each behind a norm."""

    @staticmethod
    def make_layer(config: MixtralConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp = SparseFeedForward(
            config.hidden_size, config.experts, activation=config.hidden_act, make=make, names=("w1", "w3", "w2")
        )
        return MixtralBlock(config, make, self_attn=Attention(config, layer, make), mlp=mlp)

"""Jamba.

Flow:    JambaConfig -> [JambaDecoder]
Source:  transformers' modeling_jamba.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from kvjax.models.config import RECURRENT
from kvjax.models.configs.jamba import JambaConfig
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.mamba import Mamba1

_TENSOR_NAMES = {"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"}


class AttentionBlock(PreNormBlock):
    """Attention and a feed-forward part."""

    tensor_names: ClassVar[Mapping[str, str]] = _TENSOR_NAMES


class MambaBlock(PreNormBlock):
    """A Mamba layer and a feed-forward part."""

    tensor_names: ClassVar[Mapping[str, str]] = _TENSOR_NAMES | {"self_attn": "mamba"}


class JambaExperts(SparseFeedForward):
    """The router has a name of its own in checkpoints."""

    tensor_names: ClassVar[Mapping[str, str]] = {"gate": "router"}


class JambaDecoder(Decoder):
    """Attention or Mamba, then a dense part or experts, each behind a norm."""

    tensor_names: ClassVar[Mapping[str, str]] = {"norm": "final_layernorm"}

    @staticmethod
    def make_layer(config: JambaConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp: FeedForward | SparseFeedForward
        if config.expert_layers[layer]:
            mlp = JambaExperts(config.hidden_size, config.experts, activation=config.hidden_act, make=make)
        else:
            mlp = dense_part(config, make)
        if config.layer_types[layer] == RECURRENT:
            mamba = Mamba1(config.hidden_size, config.mamba, layer, eps=config.rms_norm_eps, make=make)
            return MambaBlock(config, make, self_attn=mamba, mlp=mlp)
        return AttentionBlock(config, make, self_attn=Attention(config, layer, make), mlp=mlp)

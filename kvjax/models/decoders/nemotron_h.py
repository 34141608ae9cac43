"""Nemotron-H.

Flow:    NemotronHConfig -> [NemotronHDecoder]
Source:  transformers' modeling_nemotron_h.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
from flax import nnx

from kvjax.models.config import FULL, RECURRENT
from kvjax.models.configs.nemotron_h import NemotronHConfig
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import OnePartBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import PlainExperts, Router
from kvjax.models.layers.feed_forward import PlainFeedForward
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.mamba import Mamba2


class LatentExperts(nnx.Module):
    """Experts and a part that all tokens share; the experts may stand between two projections."""

    def __init__(self, config: NemotronHConfig, make: Make) -> None:
        size, latent, act = config.hidden_size, config.expert_size, config.hidden_act
        self.gate = Router(size, config.experts, make=make, has_bias=True)
        self.experts = PlainExperts(latent, config.experts, activation=act, make=make)
        inner, bias = config.shared_intermediate_size, config.mlp_bias
        self.shared_experts = PlainFeedForward(size, inner, activation=act, make=make, bias=bias)
        self.is_latent = latent != size
        if self.is_latent:
            self.fc1_latent_proj = make.linear(size, latent, bias=bias)
            self.fc2_latent_proj = make.linear(latent, size, bias=bias)

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        weights, experts = self.gate(hidden)
        if self.is_latent:
            out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(hidden), weights, experts))
        else:
            out = self.experts(hidden, weights, experts)
        return out + self.shared_experts(hidden)


def mixer_of(config: NemotronHConfig, layer: int, make: Make) -> nnx.Module:
    """The part of layer `layer`: Mamba, attention, a dense part or experts."""
    size, kind = config.hidden_size, config.layer_types[layer]
    if kind == RECURRENT:
        return Mamba2(size, config.mamba, f"layers.{layer}", eps=config.rms_norm_eps, make=make)
    if kind == FULL:
        return Attention(config, layer, make)
    if config.expert_layers[layer]:
        return LatentExperts(config, make)
    inner, bias = config.intermediate_size, config.mlp_bias
    return PlainFeedForward(size, inner, activation=config.hidden_act, make=make, bias=bias)


class NemotronHDecoder(Decoder):
    """One part a layer."""

    tensor_prefixes: ClassVar[tuple[str, ...]] = ("backbone.", "model.")
    anchor: ClassVar[str] = "embeddings.weight"
    tensor_names: ClassVar[Mapping[str, str]] = {"embed_tokens": "embeddings", "norm": "norm_f"}
    ignored_tensors: ClassVar[tuple[str, ...]] = ("mtp.",)

    @staticmethod
    def make_layer(config: NemotronHConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        has_cache = config.layer_types[layer] in (FULL, RECURRENT)
        return OnePartBlock(config, make, mixer=mixer_of(config, layer, make), has_cache=has_cache)

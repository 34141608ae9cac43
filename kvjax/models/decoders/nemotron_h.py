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
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import PlainExperts, Router
from kvjax.models.layers.feed_forward import PlainFeedForward
from kvjax.models.layers.forward_step import ForwardStep
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


class MixerBlock(nnx.Module):
    """One part behind a norm: Mamba, attention, a dense part or experts."""

    narrows: ClassVar[bool] = True

    def __init__(self, config: NemotronHConfig, layer: int, make: Make) -> None:
        size, eps, kind = config.hidden_size, config.rms_norm_eps, config.layer_types[layer]
        self.norm = make.norm(size, eps=eps)
        self.has_cache = kind in (FULL, RECURRENT)
        self.mixer: nnx.Module
        if kind == RECURRENT:
            self.mixer = Mamba2(size, config.mamba, layer, eps=eps, make=make)
        elif kind == FULL:
            self.mixer = Attention(config, layer, make)
        elif config.expert_layers[layer]:
            self.mixer = LatentExperts(config, make)
        else:
            inner, bias = config.intermediate_size, config.mlp_bias
            self.mixer = PlainFeedForward(size, inner, activation=config.hidden_act, make=make, bias=bias)

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer."""
        if not self.has_cache:
            hidden = step.wanted(hidden)
            return hidden + self.mixer(self.norm(hidden))
        return step.wanted(hidden) + step.wanted(self.mixer(self.norm(hidden), step))


class NemotronHDecoder(Decoder):
    """One part a layer."""

    tensor_prefixes: ClassVar[tuple[str, ...]] = ("backbone.", "model.")
    anchor: ClassVar[str] = "embeddings.weight"
    tensor_names: ClassVar[Mapping[str, str]] = {"embed_tokens": "embeddings", "norm": "norm_f"}
    ignored_tensors: ClassVar[tuple[str, ...]] = ("mtp.",)

    @staticmethod
    def make_layer(config: NemotronHConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return MixerBlock(config, layer, make)

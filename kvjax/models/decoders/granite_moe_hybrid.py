"""Granite 4.0 (GraniteMoeHybrid).

Flow:    GraniteMoeHybridConfig -> [GraniteMoeHybridDecoder]
Source:  transformers' modeling_granitemoehybrid.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
from flax import nnx

from kvjax.models.config import RECURRENT
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.configs.granite_moe_hybrid import GraniteMoeHybridConfig
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import Experts, Router
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.mamba import Mamba2
from kvjax.models.tensor_sources import Part, TensorSource, Whole


class SharedMlp(FeedForward):
    """Gate and up are one tensor of the checkpoint."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Where each projection lies."""
        inner = self.gate_proj.out_features
        return {
            "gate_proj.kernel": Part("input_linear.weight", 0, 2 * inner),
            "up_proj.kernel": Part("input_linear.weight", inner, 2 * inner),
            "down_proj.kernel": Whole("output_linear.weight", transposed=True),
        }


class GraniteExperts(nnx.Module):
    """A router and its experts, all of whose tensors stand beside each other."""

    def __init__(self, config: GraniteMoeHybridConfig, experts: ExpertsConfig, make: Make) -> None:
        self.router = Router(config.hidden_size, experts, make=make)
        self.experts = Experts(config.hidden_size, experts, activation=config.hidden_act, make=make)
        self.config = experts

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """All experts are one tensor of the checkpoint, gate and up as well."""
        inner = self.config.intermediate_size
        return {
            "router.kernel": Whole("router.layer.weight", transposed=True),
            "experts.gate": Part("input_linear.weight", 0, 2 * inner, axis=1),
            "experts.up": Part("input_linear.weight", inner, 2 * inner, axis=1),
            "experts.down": Whole("output_linear.weight", transposed=True),
        }

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        return self.experts(hidden, *self.router(hidden))


class GraniteBlock(nnx.Module):
    """Attention or Mamba, then experts and a shared part, each behind a norm and scaled."""

    narrows: ClassVar[bool] = True

    def __init__(self, config: GraniteMoeHybridConfig, layer: int, make: Make) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_recurrent = config.layer_types[layer] == RECURRENT
        if self.is_recurrent:
            self.mamba = Mamba2(size, config.mamba, f"layers.{layer}", eps=eps, make=make)
        else:
            self.self_attn = Attention(config, layer, make)
        self.block_sparse_moe = None if config.experts is None else GraniteExperts(config, config.experts, make)
        self.shared_mlp = SharedMlp(size, config.shared_intermediate_size, activation=config.hidden_act, make=make)
        self.input_layernorm = make.norm(size, eps=eps)
        self.post_attention_layernorm = make.norm(size, eps=eps)
        self.scale = config.residual_scale

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer."""
        mixer = self.mamba if self.is_recurrent else self.self_attn
        mixed = mixer(self.input_layernorm(hidden), step)
        hidden = step.wanted(hidden) + step.wanted(mixed) * self.scale
        normed = self.post_attention_layernorm(hidden)
        out = self.shared_mlp(normed)
        if self.block_sparse_moe is not None:
            out = out + self.block_sparse_moe(normed)
        return hidden + out * self.scale


class GraniteMoeHybridDecoder(Decoder):
    """Embeddings, residuals, attention and logits are scaled."""

    @staticmethod
    def make_layer(config: GraniteMoeHybridConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return GraniteBlock(config, layer, make)

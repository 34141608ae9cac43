"""Gemma 4 text.

Flow:    Gemma4Config -> [Gemma4Decoder]
Source:  transformers' modeling_gemma4.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.experts import ROWS, ExpertsConfig
from kvjax.models.configs.gemma4 import Gemma4Config
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.experts import Experts, choose_experts
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import rms_normed
from kvjax.models.layers.per_layer_inputs import PerLayerDecoder, PerLayerGate
from kvjax.models.tensor_sources import TensorSource, Whole


class Gemma4Router(nnx.Module):
    """Scores experts by normed hidden states; each expert's weight has a scale of its own."""

    def __init__(self, size: int, config: ExpertsConfig, *, eps: float, make: Make) -> None:
        self.proj = make.linear(size, config.num_experts)
        self.input_scale = make.ones(size)
        self.per_expert_scale = make.ones(config.num_experts)
        self.config = config
        self.eps = eps

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Its scale is no norm's."""
        return {"input_scale": Whole("scale")}

    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:  # float32[T, k] weights, int32[T, k] experts
        """As `choose_experts`."""
        normed = rms_normed(hidden, self.eps).astype(hidden.dtype)
        scaled = normed * self.input_scale[...][None] * jnp.asarray(hidden.shape[-1] ** -0.5, hidden.dtype)
        weights, experts = choose_experts(self.proj(scaled), self.config)
        return weights * self.per_expert_scale[...].astype(jnp.float32)[experts], experts


class Gemma4FeedForward(nnx.Module):
    """A dense part, and experts beside it if there are any. Its tensors are named as the layer's."""

    def __init__(self, config: Gemma4Config, layer: int, make: Make) -> None:
        size, eps, activation = config.hidden_size, config.rms_norm_eps, config.hidden_act
        is_wide = config.double_wide_shared and layer >= config.num_own_layers
        inner = config.intermediate_size * (2 if is_wide else 1)
        self.mlp = FeedForward(size, inner, activation=activation, make=make)
        self.pre_feedforward_layernorm = make.norm(size, eps=eps)
        self.post_feedforward_layernorm = make.norm(size, eps=eps)
        self.has_experts = config.experts is not None
        if config.experts is not None:
            self.router = Gemma4Router(size, config.experts, eps=eps, make=make)
            self.experts = Experts(size, config.experts, activation=activation, make=make, layouts=(ROWS,))
            self.post_feedforward_layernorm_1 = make.norm(size, eps=eps)
            self.pre_feedforward_layernorm_2 = make.norm(size, eps=eps)
            self.post_feedforward_layernorm_2 = make.norm(size, eps=eps)

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, normed, without residual."""
        out = self.mlp(self.pre_feedforward_layernorm(hidden))
        if self.has_experts:
            routed = self.experts(self.pre_feedforward_layernorm_2(hidden), *self.router(hidden))
            out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        return self.post_feedforward_layernorm(out)


class Gemma4Block(nnx.Module):
    """Attention, the feed-forward part and the layer's own inputs, one after another; all of it scaled."""

    tensor_names: ClassVar[Mapping[str, str]] = {"feed_forward": "", "per_layer": ""}
    narrows: ClassVar[bool] = True

    def __init__(self, config: Gemma4Config, layer: int, make: Make) -> None:
        self.self_attn = Attention(config, layer, make)
        self.input_layernorm = make.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = make.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward = Gemma4FeedForward(config, layer, make)
        self.per_layer = PerLayerGate(config, make) if config.per_layer_size else None
        self.layer_scalar = make.ones(1)

    def __call__(self, hidden: jax.Array, step: ForwardStep, own: jax.Array | None) -> jax.Array:
        """Hidden states [T, d] after the layer, whose own inputs are `own` [T, p]."""
        attended = self.self_attn(self.input_layernorm(hidden), step)
        hidden = step.wanted(hidden) + self.post_attention_layernorm(step.wanted(attended))
        hidden = hidden + self.feed_forward(hidden)
        if self.per_layer is not None and own is not None:
            hidden = hidden + self.per_layer(hidden, step.wanted(own))
        return hidden * self.layer_scalar[...][None]


class Gemma4Decoder(PerLayerDecoder):
    """Layers as `Gemma4Block`."""

    ignored_tensors: ClassVar[tuple[str, ...]] = tuple(
        f"model.{name}." for name in ("audio_tower", "embed_audio", "embed_vision", "vision_tower")
    )

    @staticmethod
    def make_layer(config: Gemma4Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return Gemma4Block(config, layer, make)

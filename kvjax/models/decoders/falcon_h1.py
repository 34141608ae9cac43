"""Falcon-H1.

Flow:    FalconH1Config -> [FalconH1Decoder]
Source:  transformers' modeling_falcon_h1.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
from flax import nnx

from kvjax.models.configs.falcon_h1 import FalconH1Config
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.feed_forward import FeedForward, gated
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.mamba import Mamba2


class ScaledFeedForward(FeedForward):
    """`down(act(a * gate(x)) * up(x)) * b` of `scales` a and b."""

    def __init__(self, config: FalconH1Config, make: Make) -> None:
        super().__init__(
            config.hidden_size, config.intermediate_size, activation=config.hidden_act, bias=config.mlp_bias, make=make
        )
        self.scales = config.mlp_scales

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        before, after = self.scales
        return self.down_proj(gated(self.gate_proj(hidden) * before, self.up_proj(hidden), self.activation)) * after


class FalconBlock(nnx.Module):
    """Attention and Mamba behind one norm, added up; then a feed-forward part behind another."""

    narrows: ClassVar[bool] = True
    tensor_names: ClassVar[Mapping[str, str]] = {"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"}

    def __init__(self, config: FalconH1Config, layer: int, make: Make) -> None:
        name, eps = f"layers.{layer}.mamba", config.rms_norm_eps
        self.self_attn = Attention(config, layer, make)
        self.mamba = Mamba2(config.hidden_size, config.mamba, name, eps=eps, make=make)
        self.mlp = ScaledFeedForward(config, make)
        self.input_layernorm = make.hidden_norm(config)
        self.post_attention_layernorm = make.hidden_norm(config)
        self.attention_scales = config.attention_scales
        self.mamba_scales = config.mamba_scales

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        normed = self.input_layernorm(hidden)
        (to_attention, of_attention), (to_mamba, of_mamba) = self.attention_scales, self.mamba_scales
        scanned = step.wanted(self.mamba(normed * to_mamba, step)) * of_mamba
        attended = step.wanted(self.self_attn(normed * to_attention, step)) * of_attention
        hidden = step.wanted(hidden) + scanned + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FalconH1Decoder(Decoder):
    """Embeddings and logits are scaled too."""

    tensor_names: ClassVar[Mapping[str, str]] = {"norm": "final_layernorm"}

    @staticmethod
    def make_layer(config: FalconH1Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return FalconBlock(config, layer, make)

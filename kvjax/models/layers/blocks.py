"""How norms and residuals stand around a layer's two parts.

A block that `narrows` gives the `wanted` rows of a step alone, once the step says that it is the last; what it calls
for attention may give these or all.

Flow:    hidden[T, d], step -> [PreNormBlock | SandwichNormBlock] -> hidden[T, d]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
from flax import nnx

from kvjax.models.configs.decoder import DecoderConfig
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make


class PreNormBlock(nnx.Module):
    """A norm before attention and one before the feed-forward part (Llama and most others)."""

    narrows: ClassVar[bool] = True

    def __init__(
        self,
        config: DecoderConfig,
        make: Make,
        *,
        self_attn: Callable[[jax.Array, ForwardStep], jax.Array],
        mlp: Callable[[jax.Array], jax.Array],
    ) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make.norm(config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset)
        self.post_attention_layernorm = make.norm(
            config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset
        )

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        attended = self.self_attn(self.input_layernorm(hidden), step)
        hidden = step.wanted(hidden) + step.wanted(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SandwichNormBlock(nnx.Module):
    """Norms before and after attention, before and after the feed-forward part (Gemma 2 and 3)."""

    narrows: ClassVar[bool] = True

    def __init__(
        self,
        config: DecoderConfig,
        make: Make,
        *,
        self_attn: Callable[[jax.Array, ForwardStep], jax.Array],
        mlp: Callable[[jax.Array], jax.Array],
    ) -> None:
        norm = {"eps": config.rms_norm_eps, "offset": config.norm_offset}
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make.norm(config.hidden_size, **norm)
        self.post_attention_layernorm = make.norm(config.hidden_size, **norm)
        self.pre_feedforward_layernorm = make.norm(config.hidden_size, **norm)
        self.post_feedforward_layernorm = make.norm(config.hidden_size, **norm)

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        attended = self.self_attn(self.input_layernorm(hidden), step)
        hidden = step.wanted(hidden) + self.post_attention_layernorm(step.wanted(attended))
        return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))

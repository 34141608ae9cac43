"""How norms and residuals stand around a layer's two parts.

A block that `narrows` gives the `wanted` rows of a step alone, once the step says that it is the last; what it calls
for attention may give these or all.

Flow:    hidden[T, d], step -> [a block] -> hidden[T, d]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
from flax import nnx

from kvjax.models.configs.decoder import DecoderConfig
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import Norm


class Block(nnx.Module):
    """Attention, then a feed-forward part; which `norms` stand where, a subclass says."""

    narrows: ClassVar[bool] = True
    norms: ClassVar[tuple[str, ...]]
    input_layernorm: Norm  # these four where `norms` has them
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm

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
        for name in self.norms:
            setattr(self, name, make.hidden_norm(config))
        self.residual_scale = config.residual_scale

    def added(self, hidden: jax.Array, part: jax.Array) -> jax.Array:  # [T or N, d] each
        """The residual with what a part adds to it."""
        return hidden + (part if self.residual_scale == 1.0 else part * self.residual_scale)


class PreNormBlock(Block):
    """A norm before attention and one before the feed-forward part (Llama and most others)."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        attended = self.self_attn(self.input_layernorm(hidden), step)
        hidden = self.added(step.wanted(hidden), step.wanted(attended))
        return self.added(hidden, self.mlp(self.post_attention_layernorm(hidden)))


class PostNormBlock(Block):
    """A norm after attention and one after the feed-forward part (OLMo 2 and 3)."""

    norms: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        attended = step.wanted(self.self_attn(hidden, step))
        hidden = self.added(step.wanted(hidden), self.post_attention_layernorm(attended))
        return self.added(hidden, self.post_feedforward_layernorm(self.mlp(hidden)))


class SandwichNormBlock(Block):
    """Norms before and after attention, before and after the feed-forward part (Gemma 2 and 3, GLM 4)."""

    norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        attended = step.wanted(self.self_attn(self.input_layernorm(hidden), step))
        hidden = self.added(step.wanted(hidden), self.post_attention_layernorm(attended))
        return self.added(hidden, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden))))


class ParallelBlock(Block):
    """Both parts have the same normed input (Command R)."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm",)

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        normed = self.input_layernorm(hidden)
        attended = step.wanted(self.self_attn(normed, step))
        return self.added(step.wanted(hidden), attended + self.mlp(step.wanted(normed)))


class OnePartBlock(nnx.Module):
    """One part behind a norm (Mamba 2, Nemotron-H)."""

    narrows: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, make: Make, *, mixer: nnx.Module, has_cache: bool = True) -> None:
        """`mixer` takes normed hidden states, and the step where it `has_cache`."""
        self.norm = make.hidden_norm(config)
        self.mixer = mixer
        self.has_cache = has_cache

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Hidden states [T, d] after the layer, of the wanted rows in the last."""
        mixer: Callable[..., jax.Array] = self.mixer
        if not self.has_cache:
            hidden = step.wanted(hidden)
            return hidden + mixer(self.norm(hidden))
        return step.wanted(hidden) + step.wanted(mixer(self.norm(hidden), step))

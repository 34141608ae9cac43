"""Gemma 3n text.

Flow:    Gemma3nConfig -> [Gemma3nDecoder]
Source:  transformers' modeling_gemma3n.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.gemma3n import Gemma3nConfig
from kvjax.models.layers.altup import AltUp, merge_streams, split_streams
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.feed_forward import ACTIVATIONS
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.per_layer_inputs import PerLayerDecoder, PerLayerGate


class Gemma3nFeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`, of whose gates a share is 0."""

    def __init__(self, config: Gemma3nConfig, layer: int, make: Make) -> None:
        size, inner = config.hidden_size, config.intermediate_sizes[layer]
        self.gate_proj = make.columns(size, inner)
        self.up_proj = make.columns(size, inner)
        self.down_proj = make.rows(inner, size)
        self.activation = config.hidden_act
        self.sparsity = config.sparsities[layer]

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        gate = self.gate_proj(hidden)
        if self.sparsity:
            gate = largest_only(gate, self.sparsity)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * self.up_proj(hidden))


def largest_only(gate: jax.Array, sparsity: float) -> jax.Array:  # [T, I] -> [T, I]
    """What of each number exceeds a bound that `sparsity` of them do not, were they normally distributed; else 0."""
    mean = jnp.mean(gate, axis=-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(jnp.square(gate - mean), axis=-1, keepdims=True))
    return jax.nn.relu(gate - (mean + deviation * NormalDist().inv_cdf(sparsity)))


class Laurel(nnx.Module):
    """Learned augmented residual layer: `x + norm(right(left(x)))`, of low rank (arXiv 2411.07501)."""

    def __init__(self, config: Gemma3nConfig, make: Make) -> None:
        self.linear_left = make.linear(config.hidden_size, config.laurel_rank)
        self.linear_right = make.linear(config.laurel_rank, config.hidden_size)
        self.post_laurel_norm = make.norm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """`hidden` and what is learned."""
        return hidden + self.post_laurel_norm(self.linear_right(self.linear_left(hidden)))


class Gemma3nBlock(nnx.Module):
    """Attention beside LAuReL, then the feed-forward part, on one stream; the others are predicted and corrected."""

    tensor_names: ClassVar[Mapping[str, str]] = {"per_layer": ""}

    def __init__(self, config: Gemma3nConfig, layer: int, make: Make) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer, make)
        self.mlp = Gemma3nFeedForward(config, layer, make)
        self.altup = AltUp(size, config.altup, eps=eps, make=make)
        self.laurel = Laurel(config, make)
        self.per_layer = PerLayerGate(config, make)
        self.input_layernorm = make.norm(size, eps=eps)
        self.post_attention_layernorm = make.norm(size, eps=eps)
        self.pre_feedforward_layernorm = make.norm(size, eps=eps)
        self.post_feedforward_layernorm = make.norm(size, eps=eps)
        self.active = config.altup.active

    def __call__(self, streams: jax.Array, step: ForwardStep, own: jax.Array) -> jax.Array:
        """Streams [P, T, d] after the layer, whose own inputs are `own` [T, p]."""
        predictions = self.altup.predict(streams)
        active = predictions[self.active]
        normed = self.input_layernorm(active)
        attended = active + self.post_attention_layernorm(self.self_attn(normed, step))
        hidden = (attended + self.laurel(normed)) * jnp.asarray(2**-0.5, active.dtype)
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        corrected = self.altup.correct(predictions, hidden)
        added = self.per_layer(self.altup.output(corrected), own)
        return jnp.concatenate([corrected[:1], corrected[1:] + added[None]])


class Gemma3nDecoder(PerLayerDecoder):
    """Streams of hidden states from the embeddings to the last norm."""

    ignored_tensors: ClassVar[tuple[str, ...]] = tuple(
        f"model.{name}." for name in ("audio_tower", "embed_audio", "embed_vision", "vision_tower")
    )

    def __init__(self, config: Gemma3nConfig, *, dtype: str, rngs: nnx.Rngs) -> None:
        """Random weights in `dtype`."""
        super().__init__(config, dtype=dtype, rngs=rngs)
        make, size = Make(jnp.dtype(dtype), rngs), config.hidden_size
        others = range(1, config.altup.num_streams)
        self.altup_projections = nnx.List([make.linear(size, size) for _ in others])
        self.altup_unembed_projections = nnx.List([make.linear(size, size) for _ in others])

    @staticmethod
    def make_layer(config: Gemma3nConfig, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return Gemma3nBlock(config, layer, make)

    def expand(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [P, T, d]
        """The embedding and its projections."""
        return split_streams(hidden, self.altup_projections)

    def collapse(self, hidden: jax.Array) -> jax.Array:  # [P, T, d] -> [T, d]
        """The mean of what the streams are projected to."""
        return merge_streams(hidden, self.altup_unembed_projections)

"""A small vector of every token for every layer (per-layer embeddings).

Flow:    token_ids[T], embeddings[T, d] -> [PerLayerDecoder.per_layer_inputs] -> [L, T, p]
Source:  transformers' modeling_{gemma3n,gemma4}.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.per_layer_inputs import PerLayerConfig
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.feed_forward import ACTIVATIONS
from kvjax.models.layers.make import Make


class PerLayerDecoder(Decoder):
    """A layer is `layer(hidden, step, own)`; `own` are its vectors [T, p], or None where `per_layer_size` is 0."""

    def __init__(self, config: PerLayerConfig, *, dtype: str, rngs: nnx.Rngs) -> None:
        """Random weights in `dtype`."""
        super().__init__(config, dtype=dtype, rngs=rngs)
        make, size = Make(jnp.dtype(dtype), rngs), config.per_layer_size
        if size:
            self.embed_tokens_per_layer = make.embedding(config.per_layer_vocab_size, config.num_layers * size)
            self.per_layer_model_projection = make.linear(config.hidden_size, config.num_layers * size)
            self.per_layer_projection_norm = make.norm(size, eps=config.rms_norm_eps)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:  # -> [T, d]
        """Normed hidden states of the last layer; padding tokens give values that mean nothing."""
        step = self.forward_step(token_ids, positions, cache)
        embedded = self.embed(token_ids)
        own_inputs: Sequence[jax.Array | None] = [None] * self.config.num_layers
        if self.config.per_layer_size:
            own_inputs = list(self.per_layer_inputs(token_ids, embedded))
        hidden = self.expand(embedded)
        for i, (layer, own) in enumerate(zip(self.layers, own_inputs, strict=True), start=1):
            step.mark_layer()
            if i == len(self.layers):
                step.narrow(layer)
            hidden = layer(hidden, step, own)
        step.mark_layer()
        return self.norm(self.collapse(hidden))

    def per_layer_inputs(
        self,
        token_ids: jax.Array,  # int32[T]
        embedded: jax.Array,  # [T, d]
    ) -> jax.Array:  # [L, T, p]
        """Every layer's vectors: of the token's id, and projected from its embedding."""
        config: PerLayerConfig = self.config
        size, dtype = config.per_layer_size, embedded.dtype
        is_known = (token_ids >= 0) & (token_ids < config.per_layer_vocab_size)
        of_ids = jnp.take(self.embed_tokens_per_layer.embedding[...], jnp.where(is_known, token_ids, 0), axis=0)
        projected = self.per_layer_model_projection(embedded) * jnp.asarray(config.hidden_size**-0.5, dtype)
        shape = (len(token_ids), config.num_layers, size)
        normed = self.per_layer_projection_norm(projected.reshape(shape))
        both = normed + of_ids.reshape(shape) * jnp.asarray(size**0.5, dtype)
        return jnp.swapaxes(both * jnp.asarray(2**-0.5, dtype), 0, 1)


class PerLayerGate(nnx.Module):
    """What a layer's own input adds: `norm(up(act(down(hidden)) * input))`. Its tensors are named as the layer's."""

    def __init__(self, config: PerLayerConfig, make: Make) -> None:
        size, own = config.hidden_size, config.per_layer_size
        self.per_layer_input_gate = make.linear(size, own)
        self.per_layer_projection = make.linear(own, size)
        self.post_per_layer_input_norm = make.norm(size, eps=config.rms_norm_eps)
        self.activation = config.hidden_act

    def __call__(self, hidden: jax.Array, own: jax.Array) -> jax.Array:  # [T, d], [T, p] -> [T, d]
        """To be added to hidden states."""
        gated = ACTIVATIONS[self.activation](self.per_layer_input_gate(hidden)) * own
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))

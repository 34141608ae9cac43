"""The frame of a decoder-only language model: embeddings, layers, a last norm, the output head.

Flow:    token_ids[T], positions[T], cache -> [Decoder] -> hidden[T, d] -> [Decoder.logits] -> float32[N, vocab]
Source:  transformers' modeling files, with whose outputs the families agree
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.decoder import DecoderConfig
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.language_model import LanguageModel
from kvjax.models.layers.make import Make


class Decoder(LanguageModel):
    """A family says in `make_layer` what its layers are; a layer is `layer(hidden, step) -> hidden`."""

    def __init__(self, config: DecoderConfig, *, dtype: str, rngs: nnx.Rngs) -> None:
        """Random weights in `dtype`."""
        make = Make(jnp.dtype(dtype), rngs)
        self.config = config
        self.embed_tokens = make.embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([self.make_layer(config, i, make) for i in range(config.num_layers)])
        self.norm = make.hidden_norm(config)
        if not config.tie_word_embeddings:
            self.lm_head = make.linear(config.hidden_size, config.vocab_size)

    @staticmethod
    @abc.abstractmethod
    def make_layer(config: Any, layer: int, make: Make) -> nnx.Module:
        """Layer number `layer` of the family whose config `config` is."""

    def embed(self, token_ids: jax.Array) -> jax.Array:  # int32[T] -> [T, d]
        """The vectors of the step's tokens; ids outside the vocabulary, of padding, give some vector."""
        hidden = jnp.take(self.embed_tokens.embedding[...], token_ids, axis=0, mode="clip")
        scale = self.config.embed_scale
        return hidden if scale == 1.0 else hidden * jnp.asarray(scale, hidden.dtype)

    def forward_step(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> ForwardStep:
        """What the layers of one trace share."""
        return ForwardStep(token_ids, positions, cache, self.config.max_model_len)

    def expand(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> what the first layer gets
        """Hidden states themselves; a family may have several streams of them."""
        return hidden

    def collapse(self, hidden: jax.Array) -> jax.Array:  # what the last layer gives -> [T, d]
        """Hidden states themselves, or what the last norm gets of several streams."""
        return hidden

    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        positions: jax.Array,  # int32[T], or [3, T] for multimodal positions
        cache: Any,  # kvjax.device.StepCache; DenseAttention for layers that only attend
    ) -> jax.Array:  # [T, d], or [N, d]
        """Normed hidden states of the last layer; padding tokens give values that mean nothing.

        Where the cache says that it has a use for N < T of them, and the last layer `narrows`, they are [N, d].
        """
        step = self.forward_step(token_ids, positions, cache)
        hidden = self.expand(self.embed(token_ids))
        for i, layer in enumerate(self.layers, start=1):
            step.mark_layer()
            if i == len(self.layers):
                step.narrow(layer)
            hidden = layer(hidden, step)
        step.mark_layer()
        return self.norm(self.collapse(hidden))

    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, d] -> float32[N, vocab]
        """Scores of the next token, scaled, after the final soft cap if the model has one."""
        config = self.config
        if config.tie_word_embeddings:
            # The table first: XLA for CPU reads the first operand as it lies and packs the other. Behind a barrier,
            # since a product that writes its result transposed is slower than one and a transposition.
            scores = jax.lax.optimization_barrier(self.embed_tokens.embedding[...] @ hidden.T).T
        else:
            scores = self.lm_head(hidden)
        scores = scores.astype(jnp.float32)
        if config.logit_scale != 1.0:
            scores = scores * config.logit_scale
        cap = config.final_logit_soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

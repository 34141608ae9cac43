"""The language models of Qwen3-VL and Qwen2.5-VL: image tokens are vectors that the caller gives.

Flow:    token_ids[T], positions[3, T], cache, embeds -> [VectorDecoder] -> hidden[T, d]
Source:  arXiv 2511.21631; transformers' modeling_qwen3_vl.py, with whose outputs it agrees
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models.decoders.llama import LlamaDecoder
from kvjax.models.decoders.qwen3 import Qwen3Decoder, Qwen3MoeDecoder
from kvjax.models.layers.decoder import Decoder


class VectorDecoder(Decoder):
    """Vectors stand for image tokens, and the first layers add theirs to the hidden states of these (DeepStack)."""

    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        positions: jax.Array,  # int32[3, T]
        cache: Any,
        embeds: tuple[jax.Array, jax.Array] | None = None,  # [rows, (1 + deepstack) * d], int32[T] -1: a token
    ) -> jax.Array:  # [T, d]
        """Normed hidden states of the last layer; padding tokens give values that mean nothing."""
        if embeds is None:
            return super().__call__(token_ids, positions, cache)
        vectors, index = embeds
        is_vector, size = (index >= 0)[:, None], self.config.hidden_size
        hidden = self.embed(token_ids)
        rows = jnp.where(is_vector, jnp.take(vectors, index, axis=0, mode="clip"), 0).astype(hidden.dtype)
        hidden = jnp.where(is_vector, rows[:, :size], hidden)
        step = self.forward_step(token_ids, positions, cache)
        for i, layer in enumerate(self.layers, start=1):
            step.mark_layer()
            hidden = layer(hidden, step)
            if i <= self.config.inputs.num_deepstack:
                hidden = hidden + rows[:, size * i : size * (i + 1)]
        step.mark_layer()
        return self.norm(hidden)


class Qwen2_5VLDecoder(VectorDecoder, LlamaDecoder):
    """Of Qwen2.5-VL, without DeepStack."""


class Qwen3VLDecoder(VectorDecoder, Qwen3Decoder):
    """Dense."""


class Qwen3VLMoeDecoder(VectorDecoder, Qwen3MoeDecoder):
    """With experts."""

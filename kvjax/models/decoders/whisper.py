"""Whisper: convolutions and bidirectional layers over audio features, then a decoder that attends to them.

Flow:    features[mel bins, frames] -> [WhisperDecoder.encode] -> K and V of every cross-attention layer, in pages
         token_ids[T], positions[T], cache -> [WhisperDecoder] -> hidden[T, d] -> logits
Source:  arXiv 2212.04356; transformers' modeling_whisper.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.models.configs.whisper import WhisperConfig
from kvjax.models.layers.feed_forward import ACTIVATIONS
from kvjax.models.layers.forward_step import mark_layer
from kvjax.models.layers.language_model import LanguageModel
from kvjax.models.layers.make import Make

_NORM_EPS = 1e-5


class Projections(nnx.Module):
    """Queries, keys and values of heads, and their output; keys have no bias."""

    def __init__(self, size: int, num_heads: int, make: Make) -> None:
        self.q_proj = make.columns(size, size, bias=True, units=num_heads)
        self.k_proj = make.columns(size, size, units=num_heads)
        self.v_proj = make.columns(size, size, bias=True, units=num_heads)
        self.out_proj = make.rows(size, size, bias=True, units=num_heads)
        self.num_heads = num_heads

    def heads(self, x: jax.Array) -> jax.Array:  # [T, d] -> [T, H, D]
        """`x` head by head."""
        return x.reshape(x.shape[0], self.num_heads, -1)

    def keys_and_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, d] -> [T, H, D] each
        """K and V of the tokens."""
        return self.heads(self.k_proj(x)), self.heads(self.v_proj(x))

    @property
    def options(self) -> AttentionOptions:
        """Scores are divided by the root of a head's dimension."""
        return AttentionOptions(sm_scale=(self.q_proj.out_features // self.num_heads) ** -0.5)


class FeedForward(nnx.Module):
    """`fc2(act(fc1(x)))` behind a norm, with its residual."""

    def __init__(self, size: int, inner: int, activation: str, make: Make) -> None:
        self.fc1 = make.columns(size, inner, bias=True)
        self.fc2 = make.rows(inner, size, bias=True)
        self.final_layer_norm = make.layer_norm(size, eps=_NORM_EPS)
        self.activation = activation

    def feed_forward(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """Hidden states after the part."""
        inner = ACTIVATIONS[self.activation](self.fc1(self.final_layer_norm(hidden)))
        return hidden + self.fc2(inner)


class EncoderLayer(FeedForward):
    """Every encoder token attends to all."""

    def __init__(self, config: WhisperConfig, make: Make) -> None:
        super().__init__(config.hidden_size, config.encoder_intermediate_size, config.hidden_act, make)
        self.self_attn = Projections(config.hidden_size, config.num_encoder_heads, make)
        self.self_attn_layer_norm = make.layer_norm(config.hidden_size, eps=_NORM_EPS)

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [E, d] -> [E, d]
        """Hidden states after the layer."""
        x, attention = self.self_attn_layer_norm(hidden), self.self_attn
        q, (k, v) = attention.heads(attention.q_proj(x)), attention.keys_and_values(x)
        attended = jax.nn.dot_product_attention(q, k, v, scale=attention.options.sm_scale)
        return self.feed_forward(hidden + attention.out_proj(attended.reshape(hidden.shape)))


class Convolution(nnx.Module):
    """A convolution of three frames, padded by one at both ends; `weight` is [out, in, 3]."""

    def __init__(self, in_size: int, out_size: int, *, stride: int, make: Make) -> None:
        self.weight = make.param(out_size, in_size, 3, scale=(3 * in_size) ** -0.5)
        self.bias = make.zeros(out_size)
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:  # [in, frames] -> [out, frames / stride]
        """The convolved frames."""
        out = jax.lax.conv_general_dilated(x[None], self.weight[...], (self.stride,), [(1, 1)])[0]
        return out + self.bias[...][:, None]


class WhisperEncoder(nnx.Module):
    """Two convolutions and the encoder's layers."""

    def __init__(self, config: WhisperConfig, make: Make) -> None:
        self.conv1 = Convolution(config.num_mel_bins, config.hidden_size, stride=1, make=make)
        self.conv2 = Convolution(config.hidden_size, config.hidden_size, stride=2, make=make)
        self.embed_positions = make.embedding(config.max_num_encoder_tokens, config.hidden_size)
        self.layers = nnx.List([EncoderLayer(config, make) for _ in range(config.num_encoder_layers)])
        self.layer_norm = make.layer_norm(config.hidden_size, eps=_NORM_EPS)

    def __call__(self, features: jax.Array) -> jax.Array:  # [mel bins, frames] -> [frames / 2, d]
        """What the decoder's cross attention sees."""
        gelu = ACTIVATIONS["gelu"]
        x = features.astype(self.conv1.weight[...].dtype)
        hidden = gelu(self.conv2(gelu(self.conv1(x)))).T
        hidden = hidden + self.embed_positions.embedding[...]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.layer_norm(hidden)


class DecoderLayer(FeedForward):
    """Causal self-attention, then attention to the encoder's tokens."""

    def __init__(self, config: WhisperConfig, layer: int, make: Make) -> None:
        super().__init__(config.hidden_size, config.decoder_intermediate_size, config.hidden_act, make)
        self.self_attn = Projections(config.hidden_size, config.num_decoder_heads, make)
        self.self_attn_layer_norm = make.layer_norm(config.hidden_size, eps=_NORM_EPS)
        self.encoder_attn = Projections(config.hidden_size, config.num_decoder_heads, make)
        self.encoder_attn_layer_norm = make.layer_norm(config.hidden_size, eps=_NORM_EPS)
        self.self_name, self.cross_name = f"layers.{layer}.self", f"layers.{layer}.cross"

    def __call__(self, hidden: jax.Array, cache: Any) -> jax.Array:  # [T, d] -> [T, d]
        """Hidden states after the layer."""
        x, attention = self.self_attn_layer_norm(hidden), self.self_attn
        q, (k, v) = attention.heads(attention.q_proj(x)), attention.keys_and_values(x)
        attended = cache(self.self_name, q, k, v, attention.options)
        hidden = hidden + attention.out_proj(attended.reshape(hidden.shape))
        x, attention = self.encoder_attn_layer_norm(hidden), self.encoder_attn
        attended = cache.attend_cross(self.cross_name, attention.heads(attention.q_proj(x)), attention.options)
        return self.feed_forward(hidden + attention.out_proj(attended.reshape(hidden.shape)))


class DecoderStack(nnx.Module):
    """Embeddings, layers and the last norm of the decoder."""

    def __init__(self, config: WhisperConfig, make: Make) -> None:
        self.embed_tokens = make.embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = make.embedding(config.max_model_len, config.hidden_size)
        self.layers = nnx.List([DecoderLayer(config, i, make) for i in range(config.num_layers)])
        self.layer_norm = make.layer_norm(config.hidden_size, eps=_NORM_EPS)


class WhisperDecoder(LanguageModel):
    """Both halves; `encode` runs once a request, the call once a step."""

    tensor_prefixes: ClassVar[tuple[str, ...]] = ("model.", "")
    anchor: ClassVar[str] = "decoder.embed_tokens.weight"
    tensor_names: ClassVar[Mapping[str, str]] = {"lm_head": "proj_out"}

    def __init__(self, config: WhisperConfig, *, dtype: str, rngs: nnx.Rngs) -> None:
        """Random weights in `dtype`."""
        make = Make(jnp.dtype(dtype), rngs)
        self.config = config
        self.encoder = WhisperEncoder(config, make)
        self.decoder = DecoderStack(config, make)
        if not config.tie_word_embeddings:
            self.lm_head = make.linear(config.hidden_size, config.vocab_size)

    def encode(self, features: jax.Array, cache: Any) -> None:
        """Writes K and V of one request's features [mel bins, frames] into the pages of every cross layer."""
        encoded = self.encoder(features)
        for layer in self.decoder.layers:
            cache.write_cross(layer.cross_name, *layer.encoder_attn.keys_and_values(encoded))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        """Normed hidden states [T, d] of the last layer; padding tokens give values that mean nothing."""
        stack = self.decoder
        hidden = jnp.take(stack.embed_tokens.embedding[...], token_ids, axis=0, mode="clip")
        hidden = hidden + jnp.take(stack.embed_positions.embedding[...], positions, axis=0, mode="clip")
        for layer in stack.layers:
            mark_layer(cache)
            hidden = layer(hidden, cache)
        mark_layer(cache)
        return stack.layer_norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, d] -> float32[N, vocab]
        """Scores of the next token."""
        if self.config.tie_word_embeddings:
            return (hidden @ self.decoder.embed_tokens.embedding[...].T).astype(jnp.float32)
        return self.lm_head(hidden).astype(jnp.float32)

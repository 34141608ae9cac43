"""Llama 4 text.

Flow:    Llama4Config -> [Llama4Decoder]
Source:  transformers' modeling_llama4.py, with whose outputs it agrees
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.experts import COLUMNS
from kvjax.models.configs.llama4 import Llama4Config
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.attention.grouped_query import attention_options
from kvjax.models.layers.attention.temperature import scaled_queries
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import Experts, choose_experts
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import rms_normed
from kvjax.models.layers.rotary import apply_rope


class Llama4Attention(nnx.Module):
    """Rotated queries and keys are normed; those of layers without rotation have a temperature by position."""

    def __init__(self, config: Llama4Config, layer: int, make: Make) -> None:
        size, heads, kv_heads, dim = config.hidden_size, config.num_q_heads, config.num_kv_heads, config.head_dim
        self.q_proj = make.columns(size, heads * dim, bias=config.qkv_bias, units=heads)
        self.k_proj = make.columns(size, kv_heads * dim, bias=config.qkv_bias, units=kv_heads)
        self.v_proj = make.columns(size, kv_heads * dim, bias=config.qkv_bias, units=kv_heads)
        self.o_proj = make.rows(heads * dim, size, bias=config.o_bias, units=heads)
        self.config = config
        self.rope = config.rope_of(layer)
        self.layer_name = f"layers.{layer}"
        self.options = attention_options(config, layer)

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """Attention over the layer's cache, the step's own tokens included."""
        heads = (hidden.shape[0], -1, self.config.head_dim)
        q, k, v = (project(hidden).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.rope is not None:
            tables = step.rope_tables(self.rope, self.config.head_dim)
            q, k = (apply_rope(x, tables, interleaved=True) for x in (q, k))
            if self.config.qk_l2_norm:
                q, k = (rms_normed(x, self.config.rms_norm_eps).astype(x.dtype) for x in (q, k))
        elif self.config.temperature is not None:
            q = scaled_queries(q, step.positions, self.config.temperature)
        out = step.cache(self.layer_name, q, k, v, self.options)
        return self.o_proj(out.reshape(hidden.shape[0], -1))


class Llama4SparseFeedForward(nnx.Module):
    """Experts, each for its tokens times their scores, and one for all tokens."""

    def __init__(self, config: Llama4Config, make: Make) -> None:
        size, inner, activation = config.hidden_size, config.experts.intermediate_size, config.hidden_act
        self.router = make.linear(size, config.experts.num_experts)
        self.experts = Experts(size, config.experts, activation=activation, make=make, layouts=(COLUMNS,))
        self.shared_expert = FeedForward(size, inner, activation=activation, make=make)
        self.config = config.experts

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        scores, experts = choose_experts(self.router(hidden), self.config)
        num_tokens, top_k = experts.shape
        rows = (hidden[:, None] * scores[..., None].astype(hidden.dtype)).reshape(num_tokens * top_k, -1)
        out = self.experts(rows, jnp.ones((len(rows), 1), jnp.float32), experts.reshape(-1, 1))
        return self.shared_expert(hidden) + out.reshape(num_tokens, top_k, -1).sum(axis=1)


class Llama4Block(PreNormBlock):
    """Its feed-forward part has a name of its own in checkpoints."""

    tensor_names: ClassVar[Mapping[str, str]] = {"mlp": "feed_forward"}


class Llama4Decoder(Decoder):
    """Attention and a feed-forward part, dense or of experts, each behind a norm."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")

    @staticmethod
    def make_layer(config: Llama4Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp: FeedForward | Llama4SparseFeedForward
        mlp = Llama4SparseFeedForward(config, make) if config.expert_layers[layer] else dense_part(config, make)
        return Llama4Block(config, make, self_attn=Llama4Attention(config, layer, make), mlp=mlp)

"""Grouped-query self-attention over whatever the cache keeps for the layer.

Flow:    hidden[T, d] -> q, k, v -> norm, rotation -> cache -> [Attention] -> hidden[T, d]

Attributes are named as the tensors of a Hugging Face checkpoint, so that a parameter's path is its tensor's name.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device.attention_options import AttentionOptions
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.rotary import apply_rope


class Attention(nnx.Module):
    """Self-attention of one layer, as its config says."""

    def __init__(self, config: AttentionDecoderConfig, layer: int, make: Make) -> None:
        size, heads, kv_heads, dim = config.hidden_size, config.num_q_heads, config.num_kv_heads, config.head_dim
        self.q_proj = make.columns(size, heads * dim, bias=config.qkv_bias, units=heads)
        self.k_proj = make.columns(size, kv_heads * dim, bias=config.qkv_bias, units=kv_heads)
        self.v_proj = make.columns(size, kv_heads * dim, bias=config.qkv_bias, units=kv_heads)
        self.o_proj = make.rows(heads * dim, size, bias=config.o_bias, units=heads)
        self.has_qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = make.norm(dim, eps=config.rms_norm_eps, offset=config.norm_offset)
            self.k_norm = make.norm(dim, eps=config.rms_norm_eps, offset=config.norm_offset)
        gate = make.columns(size, heads * dim, bias=config.qkv_bias, units=heads) if config.output_gate else None
        self.gate_proj = gate
        if config.has_sinks:
            self.sinks = make.zeros(heads)
        self.has_sinks = config.has_sinks
        self.head_dim = dim
        self.rope = config.rope_of(layer)
        self.layer_name = f"layers.{layer}"
        self.options = attention_options(config, layer)

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Sinks, as query heads."""
        return {"sinks": (0, self.sinks.shape[0])} if self.has_sinks else {}

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """Attention over the layer's cache, the step's own tokens included."""
        heads = (hidden.shape[0], -1, self.head_dim)
        q, k = self.q_proj(hidden).reshape(heads), self.k_proj(hidden).reshape(heads)
        v = self.v_proj(hidden).reshape(heads)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            tables = step.rope_tables(self.rope, self.head_dim)
            q, k = apply_rope(q, tables), apply_rope(k, tables)
        options = self.options
        if self.has_sinks:
            options = replace(options, sinks=self.sinks[...].astype(jnp.float32))
        out = step.cache(self.layer_name, q, k, v, options)
        out = out.reshape(hidden.shape[0], -1)
        return self.o_proj(out if self.gate_proj is None else out * jax.nn.sigmoid(self.gate_proj(hidden)))


def attention_options(config: AttentionDecoderConfig, layer: int) -> AttentionOptions:
    """Scale and mask of layer `layer`."""
    return AttentionOptions(
        sm_scale=config.sm_scale,
        sliding_window=config.window_of(layer),
        attention_chunk_size=config.chunk_of(layer),
        soft_cap=config.attn_logit_soft_cap,
    )

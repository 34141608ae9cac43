"""Grouped-query self-attention over whatever the cache keeps for the layer.

Flow:    hidden[T, d] -> q, k, v -> norm, rotation -> cache -> [Attention] -> hidden[T, d]

Attributes are named as the tensors of a Hugging Face checkpoint, so that a parameter's path is its tensor's name.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.models.config import FULL
from kvjax.models.configs.attention_decoder import AttentionDecoderConfig
from kvjax.models.layers.attention.temperature import scaled_queries
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import Norm, rms_normed
from kvjax.models.layers.rotary import apply_rope


class Attention(nnx.Module):
    """Self-attention of one layer, as its config says."""

    def __init__(self, config: AttentionDecoderConfig, layer: int, make: Make) -> None:
        size, heads, (kv_heads, dim) = config.hidden_size, config.num_q_heads, config.heads_of(layer)
        self.layer_name = f"layers.{layer}"
        self.writes = layer < config.num_own_layers  # else its K and V are those of another layer
        self.v_is_k = config.v_is_k and config.layer_types[layer] == FULL
        self.q_proj = make.columns(size, heads * dim, bias=config.qkv_bias, units=heads)
        if self.writes:
            self.k_proj = make.columns(size, kv_heads * dim, bias=config.qkv_bias, units=kv_heads)
        if self.writes and not self.v_is_k:
            self.v_proj = make.columns(size, kv_heads * dim, bias=config.qkv_bias, units=kv_heads)
        self.o_proj = make.rows(heads * dim, size, bias=config.o_bias, units=heads)
        self.q_norm = make_head_norm(config, heads, dim, make)
        self.k_norm = make_head_norm(config, kv_heads, dim, make) if self.writes else None
        self.norms_all_heads = config.norms_all_heads
        self.v_norm_eps = config.rms_norm_eps if config.v_norm else None
        gate = make.columns(size, heads) if config.head_gate else None
        if config.output_gate:
            gate = make.columns(size, heads * dim, bias=config.qkv_bias, units=heads)
        self.gate_proj = gate
        if config.has_sinks:
            self.sinks = make.zeros(heads)
        self.has_sinks = config.has_sinks
        self.head_dim = dim
        self.rope = config.rope_of(layer)
        self.rope_interleaved = config.rope_interleaved
        self.temperature = config.temperature
        self.options = attention_options(config, layer)

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """Sinks, as query heads."""
        return {"sinks": (0, self.sinks.shape[0])} if self.has_sinks else {}

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d] or [N, d]
        """Attention over the layer's cache, the step's own tokens included; of the wanted tokens."""
        asking = step.wanted(hidden)
        q = self._placed(self._heads(self.q_proj(asking)), self.q_norm, step)
        if self.temperature is not None:
            q = scaled_queries(q, step.wanted(step.positions), self.temperature)
        k, v = self._keys_and_values(hidden, step) if self.writes else (None, None)
        options = self.options
        if self.has_sinks:
            options = replace(options, sinks=self.sinks[...].astype(jnp.float32))
        out = step.cache(self.layer_name, q, k, v, options)
        if self.gate_proj is not None:  # by number, or by head
            out = out * jax.nn.sigmoid(self.gate_proj(asking)).reshape(*out.shape[:2], -1)
        return self.o_proj(out.reshape(asking.shape[0], -1))

    def _keys_and_values(self, hidden: jax.Array, step: ForwardStep) -> tuple[jax.Array, jax.Array]:
        """What the layer writes: [T, Hkv, D] each."""
        k = self._heads(self.k_proj(hidden))
        v = k if self.v_is_k else self._heads(self.v_proj(hidden))
        if self.v_norm_eps is not None:
            v = rms_normed(v, self.v_norm_eps).astype(v.dtype)
        return self._placed(k, self.k_norm, step), v

    def _heads(self, projected: jax.Array) -> jax.Array:  # [T, H * D] -> [T, H, D]
        return projected.reshape(projected.shape[0], -1, self.head_dim)

    def _placed(self, x: jax.Array, norm: Norm | None, step: ForwardStep) -> jax.Array:  # [T or N, H, D]
        """Normed and rotated, where the layer does either."""
        if norm is not None:
            x = norm(x.reshape(len(x), -1)).reshape(x.shape) if self.norms_all_heads else norm(x)
        if self.rope is None:
            return x
        cos, sin = step.rope_tables(self.rope, self.head_dim)
        is_whole = x.shape[0] == cos.shape[0]
        tables = (cos, sin) if is_whole else (step.wanted(cos), step.wanted(sin))
        return apply_rope(x, tables, interleaved=self.rope_interleaved)


def make_head_norm(config: AttentionDecoderConfig, num_heads: int, dim: int, make: Make) -> Norm | None:
    """The norm of so many heads of queries or keys; None: there is none."""
    if config.norms_each_head:
        return make.head_norm(num_heads, dim, eps=config.rms_norm_eps)
    if not config.qk_norm:
        return None
    width = num_heads * dim if config.norms_all_heads else dim
    return make.norm(width, eps=config.rms_norm_eps, offset=config.norm_offset)


def attention_options(config: AttentionDecoderConfig, layer: int) -> AttentionOptions:
    """Scale and mask of layer `layer`."""
    window = config.window_of(layer)
    return AttentionOptions(
        sm_scale=config.sm_scale,
        sliding_window=window,
        num_sink_tokens=0 if window is None else config.num_sink_tokens,
        sees_prompt=window is not None and config.keeps_prompt,
        attention_chunk_size=config.chunk_of(layer),
        soft_cap=config.attn_logit_soft_cap,
    )

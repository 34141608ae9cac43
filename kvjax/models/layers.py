"""The parts that the decoder blocks share: norm, attention and feed-forward.

Flow:    hidden[T, d] -> [Attention | FeedForward] -> hidden[T, d]

Attributes are named as the tensors of a Hugging Face checkpoint, so that a parameter's path is its tensor's name.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device.attention_options import AttentionOptions
from kvjax.models.config import ModelConfig
from kvjax.models.rotary import apply_rope


class Attend(Protocol):
    """What a model calls for attention: `kvjax.device.PagedKVCache` when serving, `DenseAttention` when training."""

    def __call__(
        self,
        layer_name: str,
        q: jax.Array,  # [T, Hq, D]
        k: jax.Array,  # [T, Hkv, D]
        v: jax.Array,  # [T, Hkv, D]
        options: AttentionOptions,
        /,
    ) -> jax.Array:  # [T, Hq, D]
        """Attention outputs of the step's tokens in the layer of that name."""


class RMSNorm(nnx.Module):
    """`x / rms(x) * (scale + offset)` over the last axis; Gemma stores the scale less one."""

    def __init__(self, size: int, *, eps: float, offset: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, dtype))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size]
        """Normed `x`, computed in float32, in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (normed * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def make_norm(config: ModelConfig, size: int, dtype: jnp.dtype) -> RMSNorm:
    """The norm of the model's family over `size` dimensions."""
    return RMSNorm(size, eps=config.rms_norm_eps, offset=1.0 if config.family == "gemma3" else 0.0, dtype=dtype)


def _linear(in_size: int, out_size: int, *, use_bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection whose kernel is [in_size, out_size]; random weights keep the variance of their input."""
    init = nnx.initializers.normal(in_size**-0.5)
    return nnx.Linear(in_size, out_size, use_bias=use_bias, param_dtype=dtype, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query self-attention of one layer; Qwen3 and Gemma 3 norm queries and keys per head."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = _linear(config.hidden_size, q_size, use_bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = _linear(config.hidden_size, kv_size, use_bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = _linear(config.hidden_size, kv_size, use_bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = _linear(q_size, config.hidden_size, use_bias=bias, dtype=dtype, rngs=rngs)
        self.has_qk_norm = config.family != "llama"
        if self.has_qk_norm:
            self.q_norm = make_norm(config, config.head_dim, dtype)
            self.k_norm = make_norm(config, config.head_dim, dtype)
        self.head_dim = config.head_dim
        self.layer_name = f"layers.{layer}"
        self.options = AttentionOptions(
            sm_scale=config.sm_scale,
            sliding_window=config.window_of(layer),
            soft_cap=config.attn_logit_soft_cap,
        )

    def __call__(
        self,
        hidden: jax.Array,  # [T, d]
        rope: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> jax.Array:  # [T, d]
        """Attention over whatever `attend` keeps for this layer."""
        heads = (hidden.shape[0], -1, self.head_dim)
        q = self.q_proj(hidden).reshape(heads)
        k = self.k_proj(hidden).reshape(heads)
        v = self.v_proj(hidden).reshape(heads)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer_name, apply_rope(q, rope), apply_rope(k, rope), v, self.options)
        return self.o_proj(out.reshape(hidden.shape[0], -1))


class FeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        sizes = (config.hidden_size, config.intermediate_size)
        self.gate_proj = _linear(*sizes, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.up_proj = _linear(*sizes, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.down_proj = _linear(*sizes[::-1], use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.hidden_act = config.hidden_act

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The block's output, without residual."""
        gate = self.gate_proj(hidden)
        gate = jax.nn.silu(gate) if self.hidden_act == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down_proj(gate * self.up_proj(hidden))

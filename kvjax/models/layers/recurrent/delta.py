"""Gated delta nets and Kimi Delta Attention: convolutions and the gated delta rule.

Flow:    hidden[T, d] -> q, k, v -> convolution -> rule -> gated norm -> [GatedDeltaNet, KimiDeltaAttention] -> [T, d]
Source:  Gated DeltaNet (arXiv 2412.06464); Kimi Linear (arXiv 2510.26692)

The first arrays of a layer's states are those of its convolutions, the last is that of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device import apply_delta_rule
from kvjax.models.configs.delta import DeltaConfig, KimiDeltaConfig
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.convolution import CausalConv
from kvjax.models.layers.recurrent.gated_norm import GatedRMSNorm
from kvjax.models.layers.recurrent.mamba import decay_rates
from kvjax.models.tensor_sources import TensorSource, Whole


class GatedDeltaNet(nnx.Module):
    """A decay and a rate of writing per value head; queries, keys and values are convolved together."""

    def __init__(self, size: int, config: DeltaConfig, layer: int, *, eps: float, make: Make) -> None:
        heads = config.num_value_heads
        self.in_proj_qkv = make.columns(size, config.num_channels)
        self.in_proj_z = make.columns(size, config.value_size, units=heads)
        self.in_proj_b = make.columns(size, heads)
        self.in_proj_a = make.columns(size, heads)
        self.conv1d = CausalConv(config.num_channels, config.num_taps, bias=False, make=make)
        self.dt_bias = make.ones(heads)
        self.a_log = make.zeros(heads)
        self.norm = GatedRMSNorm(config.value_dim, eps=eps, make=make, gate_first=False)
        self.out_proj = make.rows(config.value_size, size, units=heads)
        self.config = config
        self.layer_name = f"layers.{layer}"

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By head."""
        return dict.fromkeys(("dt_bias", "a_log"), (0, self.config.num_value_heads))

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Projections are as in the checkpoint."""
        return {"a_log": Whole("A_log")}

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """The layer's output, without residual."""
        config, num_tokens = self.config, hidden.shape[0]
        keys, values = (num_tokens, -1, config.key_dim), (num_tokens, -1, config.value_dim)
        qkv = self.conv1d(self.in_proj_qkv(hidden), self.layer_name, step.cache)
        q, k, v = jnp.split(qkv, [config.key_size, 2 * config.key_size], axis=-1)
        dt = self.in_proj_a(hidden).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None]
        out = apply_delta_rule(
            step.cache,
            self.layer_name,
            q.reshape(keys),
            k.reshape(keys),
            v.reshape(values),
            decay_rates(self.a_log[...])[None] * jax.nn.softplus(dt),
            jax.nn.sigmoid(self.in_proj_b(hidden)) * config.most_written,
        )
        normed = self.norm(out, self.in_proj_z(hidden).reshape(values))
        return self.out_proj(normed.reshape(num_tokens, config.value_size))


class KimiDeltaAttention(nnx.Module):
    """A decay per number of a head's key; queries, keys and values have a convolution each."""

    def __init__(self, size: int, config: KimiDeltaConfig, layer: int, *, eps: float, make: Make) -> None:
        heads, inner = config.num_heads, config.size
        for name in "qkv":
            setattr(self, f"{name}_proj", make.columns(size, inner, units=heads))
            setattr(self, f"{name}_conv1d", CausalConv(inner, config.num_taps, bias=False, make=make))
        self.f_a_proj = make.linear(size, config.head_dim)
        self.f_b_proj = make.columns(config.head_dim, inner, units=heads)
        self.b_proj = make.columns(size, heads)
        self.g_a_proj = make.linear(size, config.head_dim)
        self.g_b_proj = make.columns(config.head_dim, inner, units=heads)
        self.dt_bias = make.ones(inner)
        self.a_log = make.zeros(heads)
        self.o_norm = GatedRMSNorm(config.head_dim, eps=eps, make=make, gate_first=False, activation="sigmoid")
        self.o_proj = make.rows(inner, size, units=heads)
        self.config = config
        self.layer_name = f"layers.{layer}"

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By head."""
        return dict.fromkeys(("dt_bias", "a_log"), (0, self.config.num_heads))

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Rates are broadcast over tokens and numbers in the checkpoint."""
        return {"a_log": Whole("A_log", shape=(1, 1, self.config.num_heads, 1))}

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """The layer's output, without residual."""
        heads = (hidden.shape[0], self.config.num_heads, self.config.head_dim)
        q, k, v = (self._convolved(name, array, hidden, step).reshape(heads) for array, name in enumerate("qkv"))
        dt = self.f_b_proj(self.f_a_proj(hidden)).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None]
        g = decay_rates(self.a_log[...])[None, :, None] * jax.nn.softplus(dt.reshape(heads))
        beta = jax.nn.sigmoid(self.b_proj(hidden))
        out = apply_delta_rule(step.cache, self.layer_name, q, k, v, g, beta, array=3)
        gate = self.g_b_proj(self.g_a_proj(hidden)).reshape(heads)
        return self.o_proj(self.o_norm(out, gate).reshape(hidden.shape[0], -1))

    def _convolved(self, name: str, array: int, hidden: jax.Array, step: ForwardStep) -> jax.Array:
        """Queries, keys or values [T, heads * head_dim] after their convolution."""
        projected = getattr(self, f"{name}_proj")(hidden)
        convolved: jax.Array = getattr(self, f"{name}_conv1d")(projected, self.layer_name, step.cache, array=array)
        return convolved

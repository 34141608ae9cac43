"""Gated delta nets: a convolution and the gated delta rule.

Flow:    hidden[T, d] -> q, k, v -> convolution -> rule -> gated norm -> [GatedDeltaNet] -> hidden[T, d]
Source:  Gated DeltaNet (arXiv 2412.06464)

The states of a layer are array 0, of the convolution, and array 1, of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.device import apply_delta_rule
from kvjax.models.configs.delta import DeltaConfig
from kvjax.models.layers.convolution import CausalConv
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.gated_norm import GatedRMSNorm
from kvjax.models.layers.make import Make
from kvjax.models.layers.mamba import decay_rates
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
            jax.nn.sigmoid(self.in_proj_b(hidden)),
        )
        normed = self.norm(out, self.in_proj_z(hidden).reshape(values))
        return self.out_proj(normed.reshape(num_tokens, config.value_size))

"""Mamba layers: a convolution and a selective scan, gated.

Flow:    hidden[T, d] -> x, gate, ... -> convolution -> scan -> [Mamba1, Mamba2] -> hidden[T, d]
Source:  Mamba (arXiv 2312.00752), norms of dt, b and c: Jamba (arXiv 2403.19887); Mamba-2 (arXiv 2405.21060)

The states of a layer are array 0, of the convolution, and array 1, of the scan.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.device import scan_states
from kvjax.models.configs.mamba import Mamba1Config, Mamba2Config
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.convolution import CausalConv
from kvjax.models.layers.recurrent.gated_norm import GatedRMSNorm
from kvjax.models.tensor_sources import Part, TensorSource, Whole


class Mamba1(nnx.Module):
    """A recurrence per channel; dt, b and c come from the convolved x, each behind a norm."""

    def __init__(self, size: int, config: Mamba1Config, layer: int, *, eps: float, make: Make) -> None:
        channels, state_dim, rank = config.num_channels, config.state_dim, config.dt_rank
        self.x_in = make.columns(size, channels, bias=config.proj_bias)
        self.gate_in = make.columns(size, channels, bias=config.proj_bias)
        self.conv1d = CausalConv(channels, config.num_taps, bias=config.conv_bias, make=make)
        self.x_proj = make.rows(channels, rank + 2 * state_dim)
        self.dt_proj = make.columns(rank, channels, bias=True)
        self.a_log = make.param(channels, state_dim)
        self.d = make.param(channels)
        self.dt_layernorm = make.norm(rank, eps=eps)
        self.b_layernorm = make.norm(state_dim, eps=eps)
        self.c_layernorm = make.norm(state_dim, eps=eps)
        self.out_proj = make.rows(channels, size, bias=config.proj_bias)
        self.layer_name = f"layers.{layer}"

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By channel."""
        return {"a_log": (0, self.d.shape[0]), "d": (0, self.d.shape[0])}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """x and gate are one projection of the checkpoint."""
        channels = self.d.shape[0]
        sources: dict[str, TensorSource] = {"a_log": Whole("A_log"), "d": Whole("D")}
        for name, start in (("x_in", 0), ("gate_in", channels)):
            sources[f"{name}.kernel"] = Part("in_proj.weight", start, 2 * channels)
            sources[f"{name}.bias"] = Part("in_proj.bias", start, 2 * channels, transposed=False)
        return sources

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """The layer's output, without residual."""
        cache, (rank, state_dim) = step.cache, (self.dt_proj.in_features, self.a_log.shape[1])
        x = self.conv1d(self.x_in(hidden), self.layer_name, cache)
        dt, b, c = jnp.split(self.x_proj(x), [rank, rank + state_dim], axis=-1)
        dt = self.dt_proj(self.dt_layernorm(dt))
        b, c = self.b_layernorm(b), self.c_layernorm(c)
        out = scan_states(cache, self.layer_name, x, dt, decay_rates(self.a_log[...]), b, c, self.d[...])
        return self.out_proj(out * jax.nn.silu(self.gate_in(hidden)))


class Mamba2(nnx.Module):
    """A recurrence per head; x, b and c are convolved together, dt comes from the layer's input."""

    def __init__(self, size: int, config: Mamba2Config, layer_name: str, *, eps: float, make: Make) -> None:
        inner, heads, bias = config.inner_size, config.num_heads, config.proj_bias
        self.gate_in = make.columns(size, inner, bias=bias, units=heads)
        self.xbc_in = make.columns(size, config.num_channels, bias=bias)
        self.dt_in = make.columns(size, heads, bias=bias)
        self.conv1d = CausalConv(config.num_channels, config.num_taps, bias=config.conv_bias, make=make)
        self.dt_bias = make.zeros(heads)
        self.a_log = make.zeros(heads)
        self.d = make.ones(heads)
        norm = GatedRMSNorm(inner, eps=eps, make=make, gate_first=config.gate_first, num_groups=config.num_groups)
        self.norm = norm if config.has_norm else None
        self.out_proj = make.rows(inner, size, bias=bias if config.out_bias is None else config.out_bias, units=heads)
        self.config = config
        self.layer_name = layer_name

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By head."""
        return dict.fromkeys(("dt_bias", "a_log", "d"), (0, self.config.num_heads))

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """Gate, what is convolved, and dt are one projection of the checkpoint."""
        sources: dict[str, TensorSource] = {"a_log": Whole("A_log"), "d": Whole("D")}
        start, total = 0, self.config.inner_size + self.config.num_channels + self.config.num_heads
        for name in ("gate_in", "xbc_in", "dt_in"):
            sources[f"{name}.kernel"] = Part("in_proj.weight", start, total)
            sources[f"{name}.bias"] = Part("in_proj.bias", start, total, transposed=False)
            start += getattr(self, name).out_features
        return sources

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """The layer's output, without residual."""
        config, num_tokens = self.config, hidden.shape[0]
        inner, groups = config.inner_size, (num_tokens, config.num_groups, config.state_dim)
        gate, xbc, dt = self._projected(hidden)
        x, b, c = jnp.split(
            self.conv1d(xbc, self.layer_name, step.cache), [inner, inner + groups[1] * groups[2]], axis=-1
        )
        out = scan_states(
            step.cache,
            self.layer_name,
            x.reshape(num_tokens, config.num_heads, config.head_dim),
            dt + self.dt_bias[...][None],
            decay_rates(self.a_log[...]),
            b.reshape(groups),
            c.reshape(groups),
            self.d[...],
            dt_limit=config.dt_limit,
        ).reshape(num_tokens, inner)
        return self.out_proj(out * jax.nn.silu(gate) if self.norm is None else self.norm(out, gate))

    def _projected(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gate [T, inner], what is convolved [T, C], and dt [T, H], each scaled."""
        config = self.config
        gate, xbc, dt = self.gate_in(hidden), self.xbc_in(hidden), self.dt_in(hidden)
        if config.in_scales == (1.0,) * 5:
            return gate, xbc, dt
        state = config.num_groups * config.state_dim
        of_gate, *of_xbc, of_dt = config.in_scales
        scales = jnp.asarray(np.repeat(of_xbc, (config.inner_size, state, state)), xbc.dtype)
        return gate * of_gate, xbc * scales[None], dt * of_dt


def decay_rates(a_log: jax.Array) -> jax.Array:  # float32, as a_log
    """The negative rates that checkpoints hold the logarithms of."""
    return -jnp.exp(a_log.astype(jnp.float32))

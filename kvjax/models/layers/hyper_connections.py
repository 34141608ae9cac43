"""Hyper-connections: the residual is several streams, which a layer's part reads as one and writes back to all.

Flow:    streams[T, n, d] -> [HyperConnection.split] -> [T, d] -> a part -> [HyperConnection.join] -> streams[T, n, d]
         streams[T, n, d] -> [HyperHead] -> [T, d]
Source:  manifold-constrained hyper-connections (Xie et al. 2026); transformers' modeling_deepseek_v4.py

How streams mix is made doubly stochastic by Sinkhorn's and Knopp's iterations, so that no stream grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kvjax.models.configs.deepseek_v4 import HyperConfig
from kvjax.models.layers.make import Make
from kvjax.models.layers.norm import rms_normed
from kvjax.models.tensor_sources import TensorSource, Whole


class Mixing(NamedTuple):
    """How a part's output and the streams before it make the streams after it."""

    spread: jax.Array  # float32[T, n] of the part's output to each stream
    mix: jax.Array  # float32[T, n, n] of each stream before (first) to each after


class HyperConnection(nnx.Module):
    """Around one part of a layer."""

    def __init__(self, size: int, config: HyperConfig, *, norm_eps: float, make: Make) -> None:
        n = config.num_streams
        self.fn = make.float32_normal((2 + n) * n, n * size, scale=(n * size) ** -0.5)
        self.base = make.float32_zeros((2 + n) * n)
        self.scales = make.float32_zeros(3)  # of what reads, spreads and mixes
        self.config = config
        self.norm_eps = norm_eps

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """A norm's scale is named otherwise."""
        return {"scales": Whole("scale")}

    def split(self, streams: jax.Array) -> tuple[jax.Array, Mixing]:  # [T, n, d] -> [T, d], how to join
        """What the part reads of the streams."""
        n, eps = self.config.num_streams, self.config.eps
        read, spread, mix = jnp.split(_projected(streams, self.fn[...], self.norm_eps), [n, 2 * n], axis=-1)
        read_base, spread_base, mix_base = jnp.split(self.base[...][None], [n, 2 * n], axis=-1)
        scales = self.scales[...]
        read = jax.nn.sigmoid(read * scales[0] + read_base) + eps
        spread = 2 * jax.nn.sigmoid(spread * scales[1] + spread_base)
        mix = jax.nn.softmax((mix * scales[2] + mix_base).reshape(-1, n, n), axis=-1) + eps
        return _collapsed(streams, read), Mixing(spread, self._doubly_stochastic(mix))

    def join(self, out: jax.Array, mixing: Mixing, streams: jax.Array) -> jax.Array:  # [T, n, d]
        """The streams after the part made `out` [T, d]."""
        added = mixing.spread[:, :, None].astype(out.dtype) * out[:, None]
        return added + jnp.einsum("tjk,tjd->tkd", mixing.mix.astype(streams.dtype), streams)

    def _doubly_stochastic(self, mix: jax.Array) -> jax.Array:  # float32[T, n, n]
        eps = self.config.eps

        def scaled(mix: jax.Array, axis: int) -> jax.Array:
            return mix / (mix.sum(axis=axis, keepdims=True) + eps)

        def iterate(mix: jax.Array, _: None) -> tuple[jax.Array, None]:
            return scaled(scaled(mix, -1), -2), None

        return lax.scan(iterate, scaled(mix, -2), length=self.config.num_iterations - 1)[0]


class HyperHead(nnx.Module):
    """After the last layer: one vector of the streams."""

    def __init__(self, size: int, config: HyperConfig, *, norm_eps: float, make: Make) -> None:
        n = config.num_streams
        self.fn = make.float32_normal(n, n * size, scale=(n * size) ** -0.5)
        self.base = make.float32_zeros(n)
        self.scales = make.float32_zeros(1)
        self.eps = config.eps
        self.norm_eps = norm_eps

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """A norm's scale is named otherwise."""
        return {"scales": Whole("scale")}

    def __call__(self, streams: jax.Array) -> jax.Array:  # [T, n, d] -> [T, d]
        """Their weighted sum."""
        read = _projected(streams, self.fn[...], self.norm_eps) * self.scales[...][None] + self.base[...][None]
        return _collapsed(streams, jax.nn.sigmoid(read) + self.eps)


def _projected(streams: jax.Array, fn: jax.Array, norm_eps: float) -> jax.Array:  # [T, n, d] -> float32[T, rows of fn]
    """All streams of a token, normed as one vector, times `fn` [rows, n * d]."""
    flat = rms_normed(streams.reshape(streams.shape[0], -1), norm_eps)
    return jnp.matmul(flat, fn.T, precision=lax.Precision.HIGHEST)


def _collapsed(streams: jax.Array, weights: jax.Array) -> jax.Array:  # [T, n, d], float32[T, n] -> [T, d]
    return (weights[:, :, None] * streams.astype(jnp.float32)).sum(axis=1).astype(streams.dtype)

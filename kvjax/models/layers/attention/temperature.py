"""Queries that grow with their position, so that attention over long texts stays sharp.

Flow:    positions[T], TemperatureConfig -> [query_scales] -> scales[T]
         queries, positions[T] -> [HeadScales] -> queries, by numbers that each head has learned
Source:  arXiv 2501.19399, of which Llama 4 has a variant; transformers' modeling_{llama4,ministral3,mistral_large4}.py
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.attention_decoder import TemperatureConfig
from kvjax.models.layers.make import Make
from kvjax.models.tensor_sources import TensorSource, Whole


def query_scales(positions: jax.Array, temperature: TemperatureConfig) -> jax.Array:  # int32[T] -> float32[T]
    """What queries at `positions` are multiplied by."""
    floors = jnp.floor((positions.astype(jnp.float32) + temperature.offset) / temperature.floor)
    return jnp.log1p(floors) * temperature.scale + 1.0


def scaled_queries(
    q: jax.Array,  # [T, H, D]
    positions: jax.Array,  # int32[T]
    temperature: TemperatureConfig,
) -> jax.Array:  # [T, H, D]
    """`q` times its scales, computed in float32."""
    scales = query_scales(positions, temperature)
    return (q.astype(jnp.float32) * scales[:, None, None]).astype(q.dtype)


class HeadScales(nnx.Module):
    """Queries at position p are multiplied by `scale * ln(p + 1) + bias` of their head."""

    def __init__(self, num_heads: int, make: Make) -> None:
        self.slopes = make.zeros(num_heads)
        self.bias = make.ones(num_heads)

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """A norm's scale is named otherwise."""
        return {"slopes": Whole("scale")}

    def __call__(self, q: jax.Array, positions: jax.Array) -> jax.Array:  # [T, H, D], int32[T] -> [T, H, D]
        """`q` times its scales, computed in float32."""
        logs = jnp.log(positions.astype(jnp.float32) + 1.0)
        scales = logs[:, None] * self.slopes[...].astype(jnp.float32)[None] + self.bias[...].astype(jnp.float32)[None]
        return (q.astype(jnp.float32) * scales[..., None]).astype(q.dtype)

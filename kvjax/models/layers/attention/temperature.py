"""Queries that grow with their position, so that attention over long texts stays sharp.

Flow:    positions[T], TemperatureConfig -> [query_scales] -> scales[T]
Source:  arXiv 2501.19399, of which Llama 4 has a variant; transformers' modeling_{llama4,ministral3}.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.models.configs.attention_decoder import TemperatureConfig


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

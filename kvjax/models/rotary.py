"""Rotary position embeddings: inverse frequencies of each scaling, tables for a step's positions, rotation.

Flow:    RopeConfig, positions -> [rope_tables] -> (cos, sin) -> [apply_rope] -> q, k
Source:  transformers' modeling_rope_utils.py ("default", "linear", "llama3"); halves are rotated, not pairs
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:  # float32[head_dim // 2]
    """Radians per position of every pair of dimensions."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    return frequencies.astype(np.float32)


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_len * frequencies / (2 * math.pi)  # over the length of pretraining
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def rope_tables(
    rope: RopeConfig,
    positions: jax.Array,  # int32[T]
    head_dim: int,
) -> tuple[jax.Array, jax.Array]:  # float32[T, 1, head_dim // 2] each
    """Cosines and sines of a step's positions, to be shared by its layers."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: jax.Array,  # [T, H, D]
    tables: tuple[jax.Array, jax.Array],
) -> jax.Array:  # [T, H, D]
    """`x` with dimensions i and i + D/2 rotated together, computed in float32."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)

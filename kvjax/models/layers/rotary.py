"""Rotary position embeddings: frequencies of each scaling, tables for a step's positions, rotation.

Flow:    RopeConfig, positions -> [rope_tables] -> (cos, sin) -> [apply_rope] -> q, k
Source:  RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753); transformers'
         modeling_rope_utils.py for what each key of a config means

Keys of earlier steps stay in the cache as they were rotated, so the scalings that go by a sequence's length ("dynamic",
"longrope") go here by the longest length that the deployment allows.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.configs.rope import RopeConfig, yarn_mscale

RopeTables: TypeAlias = tuple[jax.Array, jax.Array]  # cosines and sines, float32[T, 1, rotated dimensions / 2]


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """Dimensions of a head that are rotated, the first ones, some perhaps by nothing."""
    return head_dim if rope.rope_type == "proportional" else int(head_dim * rope.partial_rotary_factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_len: int) -> np.ndarray:  # float32[rotary_dim // 2]
    """Radians per position of every pair of dimensions, for sequences of up to `max_len` tokens."""
    dim = rotary_dim(rope, head_dim)
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    frequencies = rope.theta**-exponents
    match rope.rope_type:
        case "linear":
            frequencies = frequencies / rope.factor
        case "dynamic":
            frequencies = _dynamic_theta(rope.for_length(max_len), dim) ** -exponents
        case "llama3":
            frequencies = _llama3_frequencies(rope, frequencies)
        case "yarn":
            frequencies = _yarn_frequencies(rope, frequencies, dim)
        case "proportional":
            num_turning = int(rope.partial_rotary_factor * head_dim // 2)
            frequencies = np.where(np.arange(len(frequencies)) < num_turning, frequencies / rope.factor, 0.0)
        case "longrope":
            frequencies = frequencies / np.asarray(rope.for_length(max_len).long_factor)
    return frequencies.astype(np.float32)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
        return yarn_mscale(rope.factor, 1.0)
    if rope.rope_type == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_len))
    return 1.0


def _dynamic_theta(rope: RopeConfig, dim: int) -> float:
    """The base of the longest sequence."""
    return rope.theta * rope.factor ** (dim / (dim - 2))


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_len * frequencies / (2 * math.pi)  # over the length of pretraining
    width = rope.high_freq_factor - rope.low_freq_factor
    kept = np.clip((turns - rope.low_freq_factor) / width, 0.0, 1.0) if width else turns >= rope.low_freq_factor
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn_frequencies(rope: RopeConfig, frequencies: np.ndarray, dim: int) -> np.ndarray:
    """Pairs that turn more than `beta_fast` times are kept, fewer than `beta_slow` stretched, those between mixed."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.original_max_len / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def rope_tables(
    rope: RopeConfig,
    positions: jax.Array,  # int32[T], or [3, T]
    head_dim: int,
    max_len: int,
    *,
    scales: jax.Array | None = None,  # float32[rotary_dim / 2] of frequencies
) -> RopeTables:
    """Cosines and sines of a step's positions, to be shared by its layers."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim, max_len))
    if scales is not None:
        frequencies = frequencies * scales
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    if positions.ndim == 2:
        angles = _choose_axes(angles, rope)
    factor = attention_factor(rope)
    tables = (jnp.cos(angles)[:, None] * factor, jnp.sin(angles)[:, None] * factor)
    # XLA would compute them again for every head that it rotates
    return jax.lax.optimization_barrier(tables)


def _choose_axes(angles: jax.Array, rope: RopeConfig) -> jax.Array:  # [3, T, F] -> [T, F]
    """Every frequency's angle by time, height or width; of those in turns the rest by time."""
    time, height, width = rope.mrope_section
    axes = np.zeros(angles.shape[-1], np.int64)
    if rope.mrope_interleaved:
        axes[1 : 3 * height : 3], axes[2 : 3 * width : 3] = 1, 2
    else:
        axes[time : time + height], axes[time + height :] = 1, 2
    one_hot = jnp.asarray(axes[None, :] == np.arange(3)[:, None], angles.dtype)
    return jnp.einsum("atf,af->tf", angles, one_hot)


def apply_rope(
    x: jax.Array,  # [T, H, D]
    tables: RopeTables,
    *,
    interleaved: bool = False,
) -> jax.Array:  # [T, H, D]
    """`x` with its first dimensions rotated, computed in float32.

    Of the R rotated ones, i and i + R/2 turn together, or, if `interleaved`, 2i and 2i + 1.
    """
    cos, sin = tables
    rotated_dim = 2 * cos.shape[-1]
    x32 = x.astype(jnp.float32)
    turned, rest = x32[..., :rotated_dim], x32[..., rotated_dim:]
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = jnp.stack(parts, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)

"""Numbers of few bits: packed integers, eight-bit and four-bit floats, and scales that are powers of two.

Flow:    bytes or int32 as stored -> [unpack, float8, float4] -> int8 or float32, a number each
Source:  OCP Microscaling Formats (MX) 1.0, section 5.3: E2M1, E4M3 and E8M0
"""

from __future__ import annotations

import functools

import numpy as np

# E2M1 by its four bits: sign, two of exponent, one of mantissa.
FLOAT4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack(words: np.ndarray, num_bits: int, axis: int) -> np.ndarray:  # int32[...] -> uint8[...]
    """The 32 // num_bits unsigned numbers of each word, lowest bits first, one after another along `axis`."""
    shifts = np.arange(32 // num_bits, dtype=np.uint32) * np.uint32(num_bits)
    moved = np.moveaxis(words.view(np.uint32), axis, -1)
    numbers = (moved[..., None] >> shifts) & np.uint32((1 << num_bits) - 1)
    flat = numbers.astype(np.uint8).reshape(*moved.shape[:-1], moved.shape[-1] * len(shifts))
    return np.moveaxis(flat, -1, axis)


@functools.cache
def _table(dtype: str) -> np.ndarray:  # float32[256]
    return np.arange(256, dtype=np.uint8).view(np.dtype(dtype)).astype(np.float32)


def float8(values: np.ndarray) -> np.ndarray:  # float8[...] -> float32[...]
    """The numbers, by a table of all 256, which is several times as fast as converting each."""
    return np.take(_table(values.dtype.name), values.view(np.uint8))


def float4(values: np.ndarray) -> np.ndarray:  # uint8[..., n] -> float32[..., 2 n]
    """Two numbers of each byte, that of the low bits first."""
    pairs = np.stack([FLOAT4[values & 0xF], FLOAT4[values >> 4]], axis=-1)
    return pairs.reshape(*values.shape[:-1], 2 * values.shape[-1])


def power_of_two(exponents: np.ndarray) -> np.ndarray:  # uint8[...] -> float32[...]
    """E8M0: 2 ** (e - 127); 255 is NaN."""
    powers = np.ldexp(np.float32(1), np.minimum(exponents, 254).astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers)


__all__ = ["FLOAT4", "float4", "float8", "power_of_two", "unpack"]

"""What the numbers of one state in latent pages mean: the vector itself, or fp8 with its scales beside it.

Flow:    vectors -> [EntryFormat.encode] -> latent pages -> [EntryFormat.decode] -> vectors in float32
Source:  quantisation of DeepSeek V4's caches (deepseek-ai/DeepSeek-V4-Flash, inference/): e4m3 in groups of 64 with
         scales that are powers of two, rotary numbers in bfloat16; the indexer's keys with one float32 scale

    format       numbers of a state in the pages                                                  of 512 / 128
    plain        the vector in the pages' dtype                                                   512 / 128
    LatentFp8    int8: [e4m3 numbers | bfloat16 rotary numbers | a scale per group | unused]      448 + 128 + 8 = 584
    IndexFp8     int8: [e4m3 numbers | float32 scale]                                             128 + 4 = 132

Bytes stand in the order of the machine, little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import cdiv

_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_UINT8, _BFLOAT16, _FLOAT32 = (jnp.dtype(name) for name in ("uint8", "bfloat16", "float32"))
_LARGEST = float(jnp.finfo(_FP8).max)
_E8M0_BIAS = 127
_SMALLEST_EXPONENT = -126  # of a float32 that is not subnormal


class EntryFormat(Protocol):
    """How a vector of `dim` numbers is stored. Hashable: a static argument of jitted functions."""

    def width(self, dim: int) -> int:
        """Numbers of a state in the pages.

        Raises:
            ValueError: the format has no vectors of `dim` numbers.
        """

    def fits(self, dtype: jnp.dtype) -> bool:
        """Whether pages of `dtype` can hold it."""

    def encode(self, x: jax.Array) -> jax.Array:
        """[..., width] of vectors float32[..., dim]."""

    def decode(self, rows: jax.Array, dim: int) -> jax.Array:
        """float32[..., dim] of states [..., width]."""

    def factored(self, rows: jax.Array, dim: int) -> tuple[jax.Array, jax.Array | None]:
        """(numbers [..., dim], scale float32[...] that each vector is to be multiplied with, or None) of states."""


@dataclass(frozen=True)
class Plain:
    """The vector itself, in whatever dtype the pages have."""

    def width(self, dim: int) -> int:
        """As many."""
        return dim

    def fits(self, dtype: jnp.dtype) -> bool:
        """Any."""
        return True

    def encode(self, x: jax.Array) -> jax.Array:
        """The vectors; the write rounds them."""
        return x

    def decode(self, rows: jax.Array, dim: int) -> jax.Array:
        """The vectors in float32."""
        return rows.astype(jnp.float32)

    def factored(self, rows: jax.Array, dim: int) -> tuple[jax.Array, None]:
        """The vectors as they are."""
        return rows, None


@dataclass(frozen=True)
class LatentFp8:
    """The last `rope_dim` numbers in bfloat16; the others in e4m3, times a power of two per `group` of them."""

    rope_dim: int = 64
    group: int = 64

    def width(self, dim: int) -> int:
        """Bytes; scales take one for every group of the whole vector, and are not padded further."""
        if dim <= self.rope_dim or (dim - self.rope_dim) % self.group:
            raise ValueError(
                f"expected {self.rope_dim} numbers and a multiple of {self.group} more in an entry, got {dim}"
            )
        return dim - self.rope_dim + 2 * self.rope_dim + cdiv(dim, self.group)

    def fits(self, dtype: jnp.dtype) -> bool:
        """Bytes only."""
        return dtype == jnp.int8

    def encode(self, x: jax.Array) -> jax.Array:
        """Each group is divided by the smallest power of two that brings its largest number into e4m3."""
        nope, rope = jnp.split(x.astype(jnp.float32), [x.shape[-1] - self.rope_dim], axis=-1)
        groups = nope.reshape(*nope.shape[:-1], -1, self.group)
        smallest = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1) / _LARGEST, 2.0**_SMALLEST_EXPONENT)
        mantissa, exponent = jnp.frexp(smallest)
        exponent = exponent.astype(jnp.int32) - (mantissa == 0.5).astype(jnp.int32)
        numbers = (groups * _power_of_two(-exponent)[..., None]).astype(_FP8)
        scales = (exponent + _E8M0_BIAS).astype(_UINT8)
        unused = cdiv(x.shape[-1], self.group) - scales.shape[-1]
        return jnp.concatenate(
            [
                _bytes(numbers.reshape(nope.shape)),
                _bytes(rope.astype(_BFLOAT16)),
                _bytes(jnp.pad(scales, [*[(0, 0)] * (x.ndim - 1), (0, unused)])),
            ],
            axis=-1,
        )

    def decode(self, rows: jax.Array, dim: int) -> jax.Array:
        """Numbers times the scales of their groups, and the rotary numbers."""
        nope_dim = dim - self.rope_dim
        nope, rope, scales = jnp.split(rows, [nope_dim, nope_dim + 2 * self.rope_dim], axis=-1)
        numbers = _values(nope, _FP8).astype(jnp.float32).reshape(*nope.shape[:-1], -1, self.group)
        exponent = _values(scales, _UINT8).astype(jnp.int32)[..., : numbers.shape[-2]] - _E8M0_BIAS
        numbers = (numbers * _power_of_two(exponent)[..., None]).reshape(nope.shape)
        return jnp.concatenate([numbers, _values(rope, _BFLOAT16).astype(jnp.float32)], axis=-1)

    def factored(self, rows: jax.Array, dim: int) -> tuple[jax.Array, None]:
        """The vectors in float32: no scale is that of a whole vector."""
        return self.decode(rows, dim), None


@dataclass(frozen=True)
class IndexFp8:
    """All numbers in e4m3, times one float32."""

    def width(self, dim: int) -> int:
        """Bytes."""
        return dim + 4

    def fits(self, dtype: jnp.dtype) -> bool:
        """Bytes only."""
        return dtype == jnp.int8

    def encode(self, x: jax.Array) -> jax.Array:
        """The largest number becomes the largest of e4m3; a vector of zeros has scale 1."""
        x = x.astype(jnp.float32)
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _LARGEST
        scale = jnp.where(scale == 0, 1.0, scale)
        return jnp.concatenate([_bytes((x / scale).astype(_FP8)), _bytes(scale)], axis=-1)

    def decode(self, rows: jax.Array, dim: int) -> jax.Array:
        """Numbers times the scale."""
        numbers, scale = self.factored(rows, dim)
        return numbers.astype(jnp.float32) * scale[..., None]

    def factored(self, rows: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """Numbers in e4m3, and the scale."""
        return _values(rows[..., :dim], _FP8), _values(rows[..., dim : dim + 4], _FLOAT32)[..., 0]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """float32 `2 ** exponent` of int32 exponents, exact; those below -126 give that of -126."""
    exponent = jnp.maximum(exponent, _SMALLEST_EXPONENT)
    return lax.bitcast_convert_type((exponent + _E8M0_BIAS) << 23, jnp.float32)


def _bytes(x: jax.Array) -> jax.Array:
    """int8[..., n * itemsize] of [..., n]."""
    raw = lax.bitcast_convert_type(x, jnp.int8)
    return raw.reshape(*x.shape[:-1], -1)


def _values(raw: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_bytes`."""
    size = dtype.itemsize
    shape = raw.shape if size == 1 else (*raw.shape[:-1], raw.shape[-1] // size, size)
    return lax.bitcast_convert_type(raw.reshape(shape), dtype)

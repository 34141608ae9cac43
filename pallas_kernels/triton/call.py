"""A launch of a kernel in Pallas Triton: compiled for a GPU, interpreted elsewhere.

Flow:    body, grid, arrays -> [call] -> results

A *program* is one thread block. It reads and writes arrays in memory by index; vectors and matrices that it has in
registers have sizes that are powers of two (`powers` cuts others into such).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.places import memory_size

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # deprecated since jax 0.11: a later one may not have it
    plt = None  # type: ignore[assignment]

LEAST = 16  # of each axis of a matrix product


class Part(NamedTuple):
    """Successive numbers of a vector."""

    first: int
    size: int
    room: int  # the power of two that they are loaded as

    @property
    def place(self) -> jax.Array:
        """int32[room], those beyond the end too."""
        return self.first + lax.iota(jnp.int32, self.room)

    @property
    def is_whole(self) -> bool:
        """Whether there are none beyond the end."""
        return self.size == self.room


def reason_without_triton() -> str | None:
    """Why there are no kernels in Triton, in words; None where there are."""
    return "this version of jax has no Pallas Triton" if plt is None else None


def reason_of_pages(pages: Sequence[Any]) -> str | None:
    """Why kernels in Triton cannot read page arrays, in words; None where they can."""
    if any(page.dtype.itemsize == 1 and 2**31 < memory_size(page) <= 2**32 for page in pages):
        return "Triton counts the entries of arrays of at most 4 GiB in 31 bits, got pages of 8 bits and 2 to 4 GiB"
    return reason_without_triton()


def powers(first: int, size: int) -> tuple[Part, ...]:
    """Numbers `first` to `first + size - 1` in parts of powers of two, `LEAST` or more."""
    if size <= 0:
        return ()
    room = max(LEAST, 1 << (size.bit_length() - 1))
    part = Part(first, min(size, room), room)
    return (part, *powers(first + part.size, size - part.size))


def power_from(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def call(
    body: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[jax.Array] = (),
    num_warps: int = 4,
    num_stages: int = 2,
) -> Sequence[jax.Array]:
    """What `body(*inputs, *outputs, *in_place)`, all of them references, writes into `outputs` and `in_place`.

    Arrays in place keep what no program writes; of outputs that is anything.
    """

    def run(*refs: Any) -> None:
        body(*refs[: len(inputs)], *refs[len(inputs) + len(in_place) :])

    run.__name__ = name
    shapes = [*outputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place)]
    aliases = {len(inputs) + i: len(outputs) + i for i in range(len(in_place))}

    def launch(interpret: bool) -> Callable[..., Sequence[jax.Array]]:
        return pl.pallas_call(
            run,
            out_shape=shapes,
            grid=grid,
            input_output_aliases=aliases,
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )

    return lax.platform_dependent(*inputs, *in_place, cuda=launch(False), rocm=launch(False), default=launch(True))


def load(ref: Any, index: tuple[Any, ...], mask: Any = None) -> jax.Array:
    """What stands at `index`, integer arrays that are broadcast; 0 where not `mask`."""
    if mask is None:
        return plt.load(ref.at[index])
    return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref: Any, index: tuple[Any, ...], value: jax.Array, mask: Any = None) -> None:
    """Writes `value` there, where `mask` says so."""
    plt.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def product(x: jax.Array, y: jax.Array) -> jax.Array:  # [m, k], [k, n] of one dtype
    """float32[m, n], exact products of float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def numbers(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`; 8-bit floats by their bits, since cards before 8.9 have no instruction for them."""
    if x.dtype == jnp.float8_e4m3fn:
        bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
        return e4m3(bits).astype(dtype)
    if x.dtype == jnp.float8_e5m2:
        bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
        return lax.bitcast_convert_type(bits << 8, jnp.float16).astype(dtype)
    return x.astype(dtype)


def e4m3(bits: jax.Array) -> jax.Array:
    """float16 of the numbers whose bits are the lower 8 of int16.

    Shifted by 7, exponent and mantissa stand where float16 has them; its exponents begin 8 lower. All of it is in 16
    bits, since Triton converts a whole operand of a product in every warp's registers.
    """
    magnitude = bits & 0x7F
    halves = lax.bitcast_convert_type(((bits & 0x80) << 8 | magnitude << 7).astype(jnp.int16), jnp.float16)
    return jnp.where(magnitude == 0x7F, jnp.float16(jnp.nan), halves * jnp.float16(256.0))

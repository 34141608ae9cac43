"""How rows of a cache come into shared memory on the GPU, and become numbers of a block: as they are, or out of fp8.

Flow:    latent pages -> [RowFormat.views] -> global memory -> [copy] -> stage -> [move] -> block [64, D] in tiles

A row in fp8 (`LatentFp8`) begins and ends where no array of rows could be copied from: of D 512 it has 584 bytes. So
its pages are passed as flat views, which XLA makes without a copy, and a bulk copy may begin at any element of those:

    bytes        view       copies
    numbers      e4m3       of up to 256
    what follows int16      one: rotary numbers in bfloat16, then 16 bytes that begin with the scales
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.places import PageNumbers, slabs_of
from pallas_kernels.latent_entries import EntryFormat, LatentFp8
from pallas_kernels.layouts import cdiv
from pallas_kernels.slab_pages import SlabArray

PLAIN_COLUMNS = 128  # of a plain row that are moved at once
_GROUP = 64  # numbers with one scale, and rotary ones, that are moved at once
_MOST_COPIED = 256  # elements of a bulk copy
_SCALES = 8  # int16 elements that hold the scales of a row
_FP8 = jnp.float8_e4m3fn

RowPlace = tuple[jax.Array, jax.Array]  # (slab, number of the row's first number in it)

# (columns) -> bool[rows]: which rows of a part of the stage are seen, in the layout of chunks of so many columns.
Seen = Callable[[int], jax.Array]


class RowFormat(Protocol):
    """Rows of `dim` numbers. Hashable."""

    @property
    def num_copies(self) -> int:
        """Bulk copies of a row."""

    def views(self, pages: jax.Array | SlabArray) -> tuple[jax.Array, ...]:
        """What of pages [pages, page_size, width] a kernel is given, each [slabs, elements]."""

    def stage(self, num_rows: int) -> tuple[Any, ...]:
        """Shared memory for `num_rows` rows, not tiled."""

    def copy(self, views: tuple[Any, ...], row: RowPlace, stage: tuple[Any, ...], number: int, full: Any) -> None:
        """Starts the copies of a row to place `number` of the stage; each arrives at `full`."""

    def move(self, stage: tuple[Any, ...], part: pl.Slice, seen: Seen, block: Any) -> None:
        """Rows `part` of the stage to the same of `block` [n, dim], as 0 where they are not seen."""


def row_format(entries: EntryFormat, dim: int, dtype: Any) -> RowFormat:
    """The format of pages whose states are vectors of `dim` numbers; `reason_of_entries` has nothing against it."""
    if isinstance(entries, LatentFp8):
        return Fp8Rows(dim, entries.rope_dim, entries.width(dim))
    return PlainRows(dim, jnp.dtype(dtype).name)


def reason_of_entries(entries: LatentFp8, pages: jax.Array | SlabArray) -> str | None:
    """What of pages with such entries no kernel can read, in words; None if it can."""
    if entries.group != _GROUP or entries.rope_dim not in (_GROUP, 2 * _GROUP):
        return f"GPU kernels take entries with a scale for {_GROUP} numbers and 64 or 128 rotary ones, got {entries}"
    page_bytes = PageNumbers.of(pages).places.slab_len
    if page_bytes % 16:
        return f"GPU kernels take pages of a multiple of 16 bytes with entries in fp8, got {page_bytes:,}"
    return None


@dataclass(frozen=True)
class PlainRows:
    """The numbers themselves, in the dtype of the queries."""

    dim: int
    dtype: str
    num_copies = 1

    def views(self, pages: jax.Array | SlabArray) -> tuple[jax.Array, ...]:
        """The numbers."""
        return (slabs_of(pages),)

    def stage(self, num_rows: int) -> tuple[Any, ...]:
        """As the view."""
        return (mosaic.chunked_rows((num_rows, self.dim), self.dtype, PLAIN_COLUMNS),)

    def copy(self, views: tuple[Any, ...], row: RowPlace, stage: tuple[Any, ...], number: int, full: Any) -> None:
        """The whole row at once."""
        slab, first = row
        source = views[0].at[pl.ds(slab, 1), pl.ds(first, self.dim)]
        plgpu.copy_gmem_to_smem(source, stage[0].at[pl.ds(number, 1)], full)

    def move(self, stage: tuple[Any, ...], part: pl.Slice, seen: Seen, block: Any) -> None:
        """Chunk by chunk."""
        keep = mosaic.spread(seen(PLAIN_COLUMNS), PLAIN_COLUMNS)
        for start in range(0, self.dim, PLAIN_COLUMNS):
            columns = pl.ds(start, PLAIN_COLUMNS)
            values = mosaic.load(stage[0].at[part, columns], mosaic.row_chunks(PLAIN_COLUMNS))
            block[part, columns] = jnp.where(keep, values, jnp.zeros_like(values))


@dataclass(frozen=True)
class Fp8Rows:
    """`LatentFp8`, as bfloat16: exactly what e4m3 times a power of two can be."""

    dim: int
    rope_dim: int
    width: int  # bytes of a row, even

    @property
    def num_copies(self) -> int:
        """Copies of the numbers, and one of what follows."""
        return cdiv(self._nope_dim, _MOST_COPIED) + 1

    def views(self, pages: jax.Array | SlabArray) -> tuple[jax.Array, ...]:
        """All bytes as e4m3, and in pairs as int16."""
        slabs = slabs_of(pages)
        pairs = lax.bitcast_convert_type(slabs.reshape(slabs.shape[0], -1, 2), jnp.int16)
        return lax.bitcast_convert_type(slabs, _FP8), mosaic.readable_beyond(pairs, _SCALES)

    def stage(self, num_rows: int) -> tuple[Any, ...]:
        """Rows that begin, as bulk copies want it, at multiples of 128 bytes."""
        numbers = cdiv(self._nope_dim, 2 * _GROUP) * 2 * _GROUP
        rest = cdiv(self.rope_dim + _SCALES, _GROUP) * _GROUP
        return plgpu.SMEM((num_rows, 1, numbers), _FP8), plgpu.SMEM((num_rows, 1, rest), jnp.int16)

    def copy(self, views: tuple[Any, ...], row: RowPlace, stage: tuple[Any, ...], number: int, full: Any) -> None:
        """The numbers in one or two pieces, then the rest."""
        (numbers, rest), (slab, first) = stage, row
        for start in range(0, self._nope_dim, _MOST_COPIED):
            size = min(_MOST_COPIED, self._nope_dim - start)
            source = views[0].at[pl.ds(slab, 1), pl.ds(first + start, size)]
            plgpu.copy_gmem_to_smem(source, numbers.at[number, :, pl.ds(start, size)], full)
        size = self.rope_dim + _SCALES
        source = views[1].at[pl.ds(slab, 1), pl.ds(lax.div(first + self._nope_dim, jnp.int32(2)), size)]
        plgpu.copy_gmem_to_smem(source, rest.at[number, :, pl.ds(0, size)], full)

    def move(self, stage: tuple[Any, ...], part: pl.Slice, seen: Seen, block: Any) -> None:
        """Group by group."""
        numbers, rest = stage
        layout = mosaic.row_chunks(_GROUP)
        keep = mosaic.spread(seen(_GROUP), _GROUP)

        def store(start: int, values: jax.Array) -> None:
            values = values.astype(jnp.bfloat16)
            block[part, pl.ds(start, _GROUP)] = jnp.where(keep, values, jnp.zeros_like(values))

        scales = mosaic.load_chunk_columns(rest.at[part, 0, pl.ds(self.rope_dim, _SCALES)])
        for group in range(self._nope_dim // _GROUP):
            start = group * _GROUP
            values = mosaic.load(numbers.at[part, 0, pl.ds(start, _GROUP)], layout)
            scale = mosaic.spread(_scale(scales(group // 2), group), _GROUP)
            store(start, values.astype(jnp.float16).astype(jnp.float32) * scale)
        for start in range(0, self.rope_dim, _GROUP):
            values = mosaic.load(rest.at[part, 0, pl.ds(start, _GROUP)], layout)
            store(self._nope_dim + start, lax.bitcast_convert_type(values, jnp.bfloat16))

    @property
    def _nope_dim(self) -> int:
        return self.dim - self.rope_dim


def _scale(pairs: jax.Array, group: int) -> jax.Array:
    """float32[rows] scales of a group out of int32[rows] that hold two: exponents of floats that are not subnormal."""
    exponent = (pairs >> (8 * (group % 2))) & 255
    return lax.bitcast_convert_type(lax.max(exponent, jnp.int32(1)) << 23, jnp.float32)

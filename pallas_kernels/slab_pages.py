"""Pages in memory that pages of other kinds share: one array of 32-bit words, seen as arrays of pages of any dtype.

Flow:    a column of slabs uint32[slabs, rows, 128] + PlaceInSlab -> [SlabArray] -> the ops, as an array of pages;
         what an op wrote -> SlabArray -> SlabColumn -> the column of slabs
Source:  ARCHITECTURE.md, "Pages in slabs"

A slab holds `blocks_per_slab` pages of one kind at a time. Page `id` lies in slab `id // blocks_per_slab`. An array of
it starts `first_row` rows of 128 words into the `page_rows` rows of the page:

    slab of pages     | page 0: K rows, V rows | page 1: K rows, V rows | ...            | rest |
    slab of a state   | convolution's rows, recurrence's rows                            | rest |

Numbers lie in words one after another. A TPU packs them (`packs`): a row of words holds `packing` rows of 128 numbers,
the lowest bits the first, and states that do not end with whole lanes lie as `PlaceInSlab.stored_shape` says. Words are
gathered before they are converted: the cost is that of the pages that are named, never of the memory.
`SlabArray.whole` is for kernels that take arrays alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import ROW_BYTES, TPU_LANES, cdiv, dtype_bits

LANES = TPU_LANES  # words of a row


@dataclass(frozen=True)
class PlaceInSlab:
    """Where the pages of one array lie in a slab, and what they hold; of one device."""

    page_shape: tuple[int, ...]
    dtype: str
    blocks_per_slab: int
    page_rows: int  # rows of 128 words from one page to the next
    first_row: int  # of the array in a page
    packs: bool  # whether numbers lie as TPU kernels take them

    @property
    def packing(self) -> int:
        """Numbers of a word."""
        return 32 // dtype_bits(self.dtype)

    @property
    def num_rows(self) -> int:
        """Rows of words that a page of the array takes."""
        return rows_of(math.prod(self.page_shape), self.dtype)

    def start_of(self, page: jax.Array) -> tuple[jax.Array, Any]:
        """(slab, first row of words in it) of pages int32[...]."""
        if self.blocks_per_slab == 1:
            return page, self.first_row
        slab = lax.div(page, jnp.full_like(page, self.blocks_per_slab))
        return slab, (page - slab * self.blocks_per_slab) * self.page_rows + self.first_row

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of a page's numbers as they lie.

        On TPU a page [..., R, C] is [..., R / 128, C, 128] where R are whole lanes and C are not: channels are lanes.
        """
        if not self.lies_by_lanes:
            return self.page_shape
        *leading, rows, columns = self.page_shape
        return (*leading, rows // LANES, columns, LANES)

    @property
    def lies_by_lanes(self) -> bool:
        """Whether `stored_shape` is another than that of the page."""
        *_, rows, columns = (1, *self.page_shape)
        return self.packs and columns % LANES != 0 and rows % LANES == 0

    def as_stored(self, pages: jax.Array) -> jax.Array:
        """[n, *stored_shape] of [n, *page_shape]."""
        if not self.lies_by_lanes:
            return pages
        *leading, rows, columns = pages.shape
        return pages.reshape(*leading, rows // LANES, LANES, columns).swapaxes(-2, -1)

    def from_stored(self, stored: jax.Array) -> jax.Array:
        """What `as_stored` was given."""
        return stored.swapaxes(-2, -1).reshape(-1, *self.page_shape) if self.lies_by_lanes else stored


def rows_of(count: int, dtype: str) -> int:
    """Rows of 128 words that hold so many numbers."""
    return cdiv(count * dtype_bits(dtype), 8 * ROW_BYTES)


def places_of(
    arrays: Sequence[tuple[tuple[int, ...], str]],  # page shape on one device, dtype
    blocks_per_slab: int,
    *,
    packs: bool,
) -> tuple[PlaceInSlab, ...]:
    """Where the arrays of a layer lie in a slab, one after another in every page."""
    sizes = [rows_of(math.prod(shape), dtype) for shape, dtype in arrays]
    return tuple(
        PlaceInSlab(shape, dtype, blocks_per_slab, sum(sizes), sum(sizes[:i]), packs)
        for i, (shape, dtype) in enumerate(arrays)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlabArray:
    """One array of pages [pages, *page_shape] in a column of slabs; indexed and written as a `jax.Array` is.

    An index names pages, or pages and what follows; `at[...]` knows `get` and `set` alone, no number of which is
    written twice. Under `jax.shard_map` it is a device's part.
    """

    memory: jax.Array  # uint32[slabs, rows, 128]
    place: PlaceInSlab = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, *page_shape]"""
        return (self.memory.shape[0] * self.place.blocks_per_slab, *self.place.page_shape)

    @property
    def ndim(self) -> int:
        """Dimensions, that of pages among them."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Numbers of all pages."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the numbers."""
        return jnp.dtype(self.place.dtype)

    @property
    def at(self) -> _At:
        """As `jax.Array.at`."""
        return _At(self)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.at[index].get()

    def whole(self) -> jax.Array:
        """All pages as an array of their own: free of copies on GPU where pages fill their slabs, else a copy."""
        place, (slabs, rows, _) = self.place, self.memory.shape
        filled = place.blocks_per_slab * place.page_rows
        words = self.memory if rows == filled else self.memory[:, :filled]
        pages = words.reshape(slabs * place.blocks_per_slab, place.page_rows, LANES)
        if place.page_rows != place.num_rows:
            pages = pages[:, place.first_row : place.first_row + place.num_rows]
        return numbers_of(pages.reshape(pages.shape[0], -1), place, place.page_shape)

    def with_whole(self, pages: jax.Array) -> SlabArray:
        """The array with all pages replaced."""
        return self.at[jnp.arange(self.shape[0], dtype=jnp.int32)].set(pages)


@dataclass(frozen=True)
class _At:
    array: SlabArray

    def __getitem__(self, index: Any) -> _Items:
        return _Items(self.array, index if isinstance(index, tuple) else (index,))


@dataclass(frozen=True)
class _Items:
    """What an index names: the first dimensions' places int32[...], of all the same shape."""

    array: SlabArray
    index: tuple[Any, ...]

    @property
    def _window(self) -> _Window | None:
        if any(isinstance(place, slice) for place in self.index):
            return None
        return _Window.of(self.array.place, len(self.index))

    def get(self, mode: str | None = None) -> jax.Array:
        """[..., *rest]; places out of range are clipped."""
        del mode
        window = self._window
        if window is None:
            return self.array.whole()[self.index]
        ids, *places = _broadcast(self.index)
        words = window.read(self.array, ids.reshape(-1), [place.reshape(-1) for place in places])
        numbers = numbers_of(words, self.array.place, window.shape)
        return numbers.reshape(*ids.shape, *window.shape)

    def set(self, values: jax.Array, mode: str | None = None) -> SlabArray:
        """The array with `values` [..., *rest] there; pages out of range are dropped."""
        array, window = self.array, self._window
        if window is None:  # as integers: XLA for CPU scatters floats of 16 bits as float32, which changes NaN
            bits, dtype = _integer(array.place.dtype), array.dtype
            new = lax.bitcast_convert_type(jnp.asarray(values).astype(dtype), bits)
            whole = lax.bitcast_convert_type(array.whole(), bits).at[self.index].set(new, mode=mode)
            return array.with_whole(lax.bitcast_convert_type(whole, dtype))
        ids, *places = _broadcast(self.index)
        values = jnp.broadcast_to(values, (*ids.shape, *window.shape)).astype(array.dtype)
        words = words_of(lax.optimization_barrier(values.reshape(-1, *window.shape)), array.place)
        return window.write(array, ids.reshape(-1), [place.reshape(-1) for place in places], words)


@dataclass(frozen=True)
class _Window:
    """Words that hold what follows the indexed dimensions: whole ones."""

    shape: tuple[int, ...]
    num_words: int
    strides: tuple[int, ...]  # words from one place of an indexed dimension to the next

    @classmethod
    def of(cls, place: PlaceInSlab, num_indexed: int) -> _Window | None:
        """None: it begins or ends within a word."""
        if place.lies_by_lanes and num_indexed > 1:
            return None
        shape = place.page_shape[num_indexed - 1 :]
        numbers = [math.prod(place.page_shape[i:]) for i in range(1, num_indexed)]
        packing = place.packing
        if place.packs and packing > 1:
            whole_rows = packing * LANES
            if any(count % whole_rows for count in numbers):
                return None
            num_words = LANES * cdiv(math.prod(shape), whole_rows)
        else:
            if any(count % packing for count in numbers):
                return None
            num_words = cdiv(math.prod(shape), packing)
        return cls(shape, num_words, tuple(count // packing for count in numbers))

    def read(self, array: SlabArray, ids: jax.Array, places: list[jax.Array]) -> jax.Array:
        """uint32[n, words] of n pages and places in them."""
        slab, word = self._starts(array, ids, places)
        memory, is_rows = self._memory(array)
        if array.place.packs and is_rows:
            rows = jnp.asarray(memory).reshape(-1, LANES).at[self._rows(array, slab, word)].get(mode="clip")
            return rows.reshape(ids.shape[0], self.num_words)
        size = (1, self.num_words // LANES, LANES) if is_rows else (1, self.num_words)
        starts = lax.optimization_barrier(jnp.stack([slab, word // LANES if is_rows else word], axis=1))
        numbers = lax.GatherDimensionNumbers(tuple(range(1, memory.ndim)), (0,), (0, 1))
        words = lax.gather(memory, starts, numbers, size, mode=lax.GatherScatterMode.CLIP)
        return words.reshape(ids.shape[0], self.num_words)

    def write(self, array: SlabArray, ids: jax.Array, places: list[jax.Array], words: jax.Array) -> SlabArray:
        """The array with uint32[n, words] there."""
        slab, word = self._starts(array, ids, places)
        slab = jnp.where((ids >= 0) & (ids < array.shape[0]), slab, array.memory.shape[0])  # out of range: dropped
        memory, is_rows = self._memory(array)
        if array.place.packs and is_rows:
            rows = self._rows(array, slab, word)
            updates = words.reshape(*rows.shape, LANES)
            written = jnp.asarray(memory).reshape(-1, LANES).at[rows].set(updates, mode="drop")
            return replace(array, memory=written.reshape(memory.shape))
        starts = lax.optimization_barrier(jnp.stack([slab, word // LANES if is_rows else word], axis=1))
        numbers = lax.ScatterDimensionNumbers(tuple(range(1, memory.ndim)), (0,), (0, 1))
        updates = words.reshape(-1, self.num_words // LANES, LANES) if is_rows else words
        drop = lax.GatherScatterMode.FILL_OR_DROP
        written = lax.scatter(memory, starts, updates, numbers, mode=drop)
        return replace(array, memory=written.reshape(array.memory.shape))

    def _starts(self, array: SlabArray, ids: jax.Array, places: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(slab, word in it) int32[n] each."""
        slab, row = array.place.start_of(ids)
        word = jnp.zeros_like(ids) + row * LANES
        for stride, at in zip(self.strides, places, strict=True):
            word = word + stride * at
        return slab, word

    def _rows(self, array: SlabArray, slab: jax.Array, word: jax.Array) -> jax.Array:
        """int32[n, rows] of the memory of all slabs: a TPU's XLA copies it for windows of several rows."""
        first = slab * array.memory.shape[1] + word // LANES
        return first[:, None] + jnp.arange(self.num_words // LANES, dtype=jnp.int32)

    def _memory(self, array: SlabArray) -> tuple[jax.Array, bool]:
        """The slabs by rows where windows are whole rows, else by words."""
        is_rows = all(count % LANES == 0 for count in (self.num_words, *self.strides))
        return (array.memory if is_rows else array.memory.reshape(array.memory.shape[0], -1)), is_rows


def _broadcast(index: tuple[Any, ...]) -> list[jax.Array]:
    return list(jnp.broadcast_arrays(*(jnp.asarray(x, jnp.int32) for x in index)))


def numbers_of(words: jax.Array, place: PlaceInSlab, shape: tuple[int, ...]) -> jax.Array:
    """[n, *shape] in the place's dtype of uint32[n, words]; moved as integers, so that all bits stay."""
    n, packing = words.shape[0], place.packing
    if place.packs and packing > 1:
        words = words.reshape(n, -1, LANES)
    numbers = lax.bitcast_convert_type(words, _integer(place.dtype))
    if place.packs and packing > 1:
        numbers = numbers.swapaxes(2, 3)
    numbers = numbers.reshape(n, -1)[:, : math.prod(shape)]
    if place.lies_by_lanes:
        numbers = place.from_stored(numbers.reshape(n, *place.stored_shape))
    return lax.bitcast_convert_type(numbers.reshape(n, *shape), jnp.dtype(place.dtype))


def words_of(numbers: jax.Array, place: PlaceInSlab) -> jax.Array:
    """uint32[n, words] of [n, *shape], filled up with zeros."""
    n, packing = numbers.shape[0], place.packing
    numbers = lax.bitcast_convert_type(numbers, _integer(place.dtype))
    flat = place.as_stored(numbers).reshape(n, -1)
    if packing == 1:
        return flat
    unit = packing * LANES if place.packs else packing
    flat = jnp.pad(flat, [(0, 0), (0, -flat.shape[1] % unit)])
    if place.packs:
        return lax.bitcast_convert_type(flat.reshape(n, -1, packing, LANES).swapaxes(2, 3), jnp.uint32).reshape(n, -1)
    return lax.bitcast_convert_type(flat.reshape(n, -1, packing), jnp.uint32)


def _integer(dtype: str) -> jnp.dtype:
    """The unsigned integers of as many bits."""
    return jnp.dtype(f"uint{dtype_bits(dtype)}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlabColumn:
    """The arrays of one layer's pages in a column of slabs: a sequence of `SlabArray`, as a tuple of arrays is."""

    memory: jax.Array  # uint32[slabs, rows, 128]
    places: tuple[PlaceInSlab, ...] = field(metadata={"static": True})

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> SlabArray:
        return SlabArray(self.memory, self.places[i])

    def __iter__(self) -> Iterator[SlabArray]:
        return (SlabArray(self.memory, place) for place in self.places)

    def after(self, array: SlabArray) -> SlabColumn:
        """The column once one of its arrays was written."""
        return replace(self, memory=array.memory)


def page_arrays(pages: Any) -> tuple[jax.Array, ...]:
    """The arrays of a layer's pages as the ops keep them; a `SlabColumn` passes for a tuple of arrays."""
    return cast(tuple[jax.Array, ...], pages if isinstance(pages, SlabColumn) else tuple(pages))


def in_one_column(arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Arrays of a layer's pages as the ops keep them: a `SlabColumn` where all lie in one memory, else the tuple."""
    slabs = [array for array in arrays if isinstance(array, SlabArray)]
    if len(slabs) < len(arrays) or any(array.memory is not slabs[0].memory for array in slabs):
        return tuple(arrays)
    return page_arrays(SlabColumn(slabs[0].memory, tuple(array.place for array in slabs)))


def replaced(pages: Any, i: int, array: Any) -> tuple[jax.Array, ...]:
    """The pages once array `i` of them was written."""
    return page_arrays(pages.after(array) if isinstance(pages, SlabColumn) else (*pages[:i], array, *pages[i + 1 :]))


def name_in_slabs(op: str, pages: Any) -> str:
    """What an op is called in messages and in the record of what ran (`ran_on`): apart where pages lie in slabs."""
    return f"{op} in slabs" if is_in_slabs(pages) else op


def is_in_slabs(pages: Any) -> bool:
    """Whether a layer's pages, or an array of them, lie in slabs."""
    return isinstance(pages, SlabColumn | SlabArray)


__all__ = [
    "PlaceInSlab",
    "SlabArray",
    "SlabColumn",
    "in_one_column",
    "is_in_slabs",
    "name_in_slabs",
    "numbers_of",
    "page_arrays",
    "places_of",
    "replaced",
    "rows_of",
    "words_of",
]

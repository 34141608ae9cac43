"""Arrays of pages as GPU kernels are given them: one array of entries, and which entry a page begins with.

Flow:    an array of pages, of its own or in slabs -> [PageView] -> entries for a kernel + PagePlaces -> entry of a page
Source:  ARCHITECTURE.md, "Pages in slabs"

An *entry* is what the last dimensions of a page hold: the heads of a token, a latent, a row of a state. On a GPU the
memory of slabs is seen so without a copy, whatever else lies in it; elsewhere XLA copies it.

    entries of a slab    | page 0: K | V | page 1: K | V | ... | rest |      V of page 1 begins with entry
                                     |-----page_len--|                       slab * slab_len + page_len + first
                          |--first---|
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.slab_pages import ROW_BYTES, SlabArray


class PagePlaces(NamedTuple):
    """Where pages begin, in entries; of an array of their own each page is a slab."""

    pages_per_slab: int
    slab_len: int
    page_len: int  # 0 where a slab has one page
    first: int

    @classmethod
    def of(cls, array: jax.Array | SlabArray, entry_dims: int) -> PagePlaces | None:
        """Of entries that are the last `entry_dims` dimensions; None: pages begin within such."""
        pages_per_slab, *sizes = cls.of_numbers(array)
        entry_size = math.prod(array.shape[array.ndim - entry_dims :])
        if any(size % entry_size for size in sizes):
            return None
        return cls(pages_per_slab, *(size // entry_size for size in sizes))

    @classmethod
    def of_numbers(cls, array: jax.Array | SlabArray) -> PagePlaces:
        """Of entries that are single numbers."""
        if not isinstance(array, SlabArray):
            return cls(1, math.prod(array.shape[1:]), 0, 0)
        place, row = array.place, ROW_BYTES // array.dtype.itemsize
        page_rows = place.page_rows if place.blocks_per_slab > 1 else 0
        return cls(place.blocks_per_slab, array.memory.shape[1] * row, page_rows * row, place.first_row * row)

    @property
    def step(self) -> int:
        """The most entries of which every page begins after a multiple."""
        return math.gcd(self.slab_len, self.page_len, self.first)

    def slab_and_entry(self, page: jax.Array) -> tuple[jax.Array, Any]:
        """(slab of a page, the first of its entries in the slab)."""
        if self.pages_per_slab == 1:
            return page, self.first
        per_slab = lax.full_like(page, self.pages_per_slab)
        return lax.div(page, per_slab), lax.rem(page, per_slab) * self.page_len + self.first

    def entry(self, page: jax.Array) -> jax.Array:
        """The first entry of a page."""
        slab, entry = self.slab_and_entry(page)
        return slab * self.slab_len + entry


class PageView(NamedTuple):
    """An array of pages for a kernel."""

    entries: jax.Array  # [entries, *entry]
    places: PagePlaces

    @classmethod
    def of(cls, array: jax.Array | SlabArray, entry_dims: int) -> PageView:
        """The view whose entries are the last `entry_dims` dimensions; no page begins within an entry."""
        places = PagePlaces.of(array, entry_dims)
        assert places is not None, f"expected pages of whole entries, see reason_of_places; got {array}"
        entry = array.shape[array.ndim - entry_dims :]
        return cls(memory_numbers(array).reshape(-1, *entry), places)


@dataclass(frozen=True)
class PageNumbers:
    """Where the numbers of pages lie in `slabs_of`."""

    places: PagePlaces  # in numbers
    strides: tuple[int, ...]  # of the dimensions of a page

    @classmethod
    def of(cls, array: jax.Array | SlabArray) -> PageNumbers:
        """Those of an array of pages."""
        page_shape = array.shape[1:]
        strides = tuple(math.prod(page_shape[i:]) for i in range(1, array.ndim))
        return cls(PagePlaces.of_numbers(array), strides)

    def at(self, page: jax.Array, *index: Any) -> tuple[jax.Array, jax.Array]:
        """(slab, number in it) of an index into the array of pages, integer arrays that are broadcast."""
        slab, number = self.places.slab_and_entry(page)
        for stride, place in zip(self.strides, index, strict=True):
            number = number + place * stride
        return slab, number

    def count(self, slabs: Any) -> int:
        """Pages of `slabs_of`: the first number that is none's."""
        return int(slabs.shape[0]) * self.places.pages_per_slab


def memory_size(array: jax.Array | SlabArray) -> int:
    """How many numbers `memory_numbers` has."""
    if not isinstance(array, SlabArray):
        return math.prod(array.shape)
    return array.memory.size * array.memory.dtype.itemsize // array.dtype.itemsize


def memory_numbers(array: jax.Array | SlabArray) -> jax.Array:
    """All numbers of the slabs' memory, of whichever array they are; of an array of its own its numbers."""
    if not isinstance(array, SlabArray):
        return array
    return lax.bitcast_convert_type(array.memory, array.dtype)


def slabs_of(array: jax.Array | SlabArray) -> jax.Array:
    """[slabs, numbers] all numbers of the memory that the pages lie in."""
    return memory_numbers(array).reshape(array.memory.shape[0] if isinstance(array, SlabArray) else array.shape[0], -1)


def with_memory(array: jax.Array | SlabArray, numbers: jax.Array) -> Any:
    """The array of pages whose numbers, as `memory_numbers` has them but for the shape, a kernel has changed."""
    if not isinstance(array, SlabArray):
        return numbers.reshape(array.shape)
    packing = array.place.packing
    words = numbers.reshape(*array.memory.shape, *([packing] if packing > 1 else []))
    return replace(array, memory=lax.bitcast_convert_type(words, jnp.uint32))


def reason_of_places(array: jax.Array | SlabArray, entry_dims: int, step: int) -> str | None:
    """Why a kernel finds no pages that begin after multiples of `step` entries, in words; None where it does."""
    if not isinstance(array, SlabArray):
        return None
    places = PagePlaces.of(array, entry_dims)
    if places is not None and places.step % step == 0:
        return None
    entry, (rows, place) = array.shape[array.ndim - entry_dims :], (array.memory.shape[1], array.place)
    return (
        f"GPU kernels take pages that begin after a multiple of {step} x {entry} numbers, got slabs of {rows} rows of "
        f"128 words with a page every {place.page_rows} rows from row {place.first_row} on"
    )

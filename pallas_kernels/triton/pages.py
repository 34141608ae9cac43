"""Arrays of pages as Triton kernels read and write them: the numbers of each slab in a row, whatever kind holds it.

Flow:    an array of pages, of its own or in slabs -> [slabs_of] -> kernel's array; page, slot, ... -> [PageNumbers.at]
Source:  ARCHITECTURE.md, "Pages in slabs"

An array of its own is one whose slabs are its pages. Slab and number are apart, since both are counted in 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.gpu.places import PagePlaces
from pallas_kernels.slab_pages import SlabArray


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

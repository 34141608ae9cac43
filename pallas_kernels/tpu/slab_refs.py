"""Arrays of pages in slabs as TPU kernels have them: by a reference to which XLA's array of words is viewed.

Flow:    SlabArray -> [operand] -> pallas_call -> reference to words -> [seen_by_kernel] -> `.at[page]` in the kernel
         result of pallas_call -> [written] -> SlabArray
         several arrays at once: a tuple of them, or the SlabColumn in which they share one memory
Source:  ARCHITECTURE.md, "Pages in slabs"

XLA sees the words alone, so that it neither converts nor copies the memory. A last dimension of 128 words makes memory
linear: bitcast and reshape of a reference cost nothing, and a DMA begins at any row. Where pages fill their slabs the
view is one of an array [pages, *page_shape]; else a page is found by its slab and its rows (`PagesRef`).

The interpreter knows no bitcast of references: there XLA takes the pages out of their slabs and puts them back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.slab_pages import PlaceInSlab, SlabArray, SlabColumn
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Ref, is_interpreted


def reason_of_slab_rows(pages: Any) -> str | None:
    """Why no kernel moves rows of the slabs that hold an array of pages, in words; None if all do, or it is in none."""
    if isinstance(pages, SlabArray) and pages.memory.shape[1] % SUBLANES:
        return f"TPU kernels take slabs of a multiple of {SUBLANES} rows, got {pages.memory.shape[1]}"
    return None


def reason_of_slabs(pages: Any) -> str | None:
    """What of an array of pages in slabs no kernel can see, in words; None if all do, or they are in no slabs."""
    reason = reason_of_slab_rows(pages)
    if reason is not None or not isinstance(pages, SlabArray):
        return reason
    place = pages.place
    if not place.packs and place.packing > 1:
        return f"TPU kernels read packed {place.dtype} in slabs; make them by places_of(packs=True)"
    if place.stored_shape[-1] != LANES or math.prod(place.stored_shape) != place.num_rows * place.packing * LANES:
        return f"TPU kernels read pages in slabs whose numbers fill rows of {LANES} words, got {place.page_shape}"
    return None


def seen_shape(pages: jax.Array | SlabArray) -> tuple[int, ...]:
    """Shape of a kernel's reference to an array of pages."""
    return (pages.shape[0], *pages.place.stored_shape) if isinstance(pages, SlabArray) else pages.shape


def as_stored(pages: SlabArray) -> SlabArray:
    """The same numbers as an array [pages, *stored_shape]."""
    return replace(pages, place=replace(pages.place, page_shape=pages.place.stored_shape))


def parts(value: Any) -> list[Any]:
    """The values of which `pallas_call` is given one operand each: those of a tuple, and what a column consists of."""
    if isinstance(value, tuple) or (isinstance(value, SlabColumn) and is_interpreted()):
        return list(value)
    return [value]


def operand(value: Any) -> Any:
    """What `pallas_call` is given for a value; a tuple where it has several `parts`."""
    if isinstance(value, SlabColumn) and not is_interpreted():
        return value.memory
    if isinstance(value, tuple | SlabColumn):
        return tuple(map(operand, value))
    if not isinstance(value, SlabArray):
        return value
    return value.place.as_stored(value.whole()) if is_interpreted() else value.memory


def written(before: Any, result: Any) -> Any:
    """A result of `pallas_call` as the value whose `operand` it was changed from."""
    if isinstance(before, SlabColumn):
        return _written_column(before, result)
    if isinstance(before, tuple):
        return tuple(map(written, before, result))
    if not isinstance(before, SlabArray):
        return result
    if is_interpreted():
        return before.with_whole(before.place.from_stored(result))
    return SlabArray(result, before.place)


def _written_column(before: SlabColumn, result: Any) -> SlabColumn:
    if not is_interpreted():
        return replace(before, memory=result)
    for i, pages in enumerate(result):
        before = before.after(written(before[i], pages))
    return before


def seen_by_kernel(value: Any, ref: Ref) -> Ref:
    """The kernel's reference to a value, of the reference to its `operand`; to a column those to its arrays."""
    if isinstance(value, SlabColumn):
        return tuple(seen_by_kernel(array, ref) for array in value)
    if not isinstance(value, SlabArray) or is_interpreted():
        return ref
    numbers = ref.bitcast(jnp.dtype(value.place.dtype))
    if _fill_slabs(value):
        return numbers.reshape(*seen_shape(value))
    slabs, rows, lanes = value.memory.shape
    return PagesRef(numbers.reshape(slabs * rows, value.place.packing, lanes), value.place, rows)


def page_names(pages: Any, ids: jax.Array) -> jax.Array:
    """int32[...]: what `named_page` takes for pages `ids` int32[...], so that no kernel divides for a page; -1: < 0."""
    if not isinstance(pages, SlabArray) or is_interpreted() or _fill_slabs(pages):
        return ids
    return first_word_row(pages, ids)


def named_page(pages: Ref, name: jax.Array) -> Ref:
    """A page of a kernel's reference by its name."""
    return pages.from_row(name) if isinstance(pages, PagesRef) else pages.at[name]


def row_unit(pages: Any) -> int:
    """Rows of words of which every page [rows, pieces, packing, 128] has whole ones: `pieces`, or in some slabs 1."""
    pieces = pages.shape[-3]
    if not isinstance(pages, SlabArray):
        return int(pieces)
    begins = (pages.memory.shape[1], pages.place.page_rows, pages.place.first_row)
    return 1 if any(row % pieces for row in begins) else int(pieces)


def word_rows(pages: Any, unit: int) -> Any:
    """The memory of pages [..., packing, 128] as [n, unit, packing, 128], an array or one in slabs."""
    if not isinstance(pages, SlabArray):
        return pages.reshape(-1, unit, *pages.shape[-2:])
    place, rows = pages.place, pages.memory.shape[1]
    some = PlaceInSlab((unit, place.packing, LANES), place.dtype, rows // unit, unit, first_row=0, packs=True)
    return SlabArray(pages.memory, some)


def first_word_row(pages: Any, ids: jax.Array) -> jax.Array:
    """Row of words, in the memory of all, where pages `ids` int32[...] begin."""
    if not isinstance(pages, SlabArray):
        return ids * math.prod(pages.shape[1:-2])
    slab, row = pages.place.start_of(ids)
    return slab * pages.memory.shape[1] + row


@dataclass(frozen=True)
class PagesRef:
    """Pages that leave something of their slabs, as a reference of shape [pages, *stored_shape]."""

    rows: Ref  # HBM [rows of words of all slabs, packing, 128]
    place: PlaceInSlab
    slab_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, *stored_shape]"""
        return (self.rows.shape[0] // self.slab_rows * self.place.blocks_per_slab, *self.place.stored_shape)

    @property
    def at(self) -> PagesRef:
        """Takes indexes: a page, and more within it."""
        return self

    def __getitem__(self, index: Any) -> Ref:
        page, *rest = index if isinstance(index, tuple) else (index,)
        slab, row = self.place.start_of(page)
        whole = self.from_row(slab * self.slab_rows + row)
        return whole.at[tuple(rest)] if rest else whole

    def from_row(self, row: jax.Array) -> Ref:
        """The page that begins with a row of `rows`."""
        return self.rows.at[pl.ds(row, self.place.num_rows)].reshape(*self.place.stored_shape)


def _fill_slabs(pages: SlabArray) -> bool:
    place = pages.place
    return place.num_rows == place.page_rows and pages.memory.shape[1] == place.blocks_per_slab * place.page_rows

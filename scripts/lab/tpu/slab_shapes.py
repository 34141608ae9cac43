"""Arguments of a case with its pages in slabs, as shapes, for compilation.

Flow:    "filled" or "shared" + shapes of arguments -> [in_slabs] -> shapes with a `SlabColumn`

    filled   eight pages of a slab fill it
    shared   three pages, before each of them rows of another array, and behind the last a rest
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cases.case import Arguments
from pallas_kernels.layouts import cdiv
from pallas_kernels.slab_pages import ROW_BYTES, SlabColumn, places_of

KINDS = ("filled", "shared")
_ROW = ((ROW_BYTES // 4,), "float32")
_ROWS_BEFORE = 12  # of another array
_TILE_ROWS = 8


def in_slabs(kind: str, arguments: Arguments) -> Arguments:
    """The arguments with their page arrays, shapes all, in one column of slabs.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"expected slabs out of {KINDS}, got {kind!r}")
    blocks, before = (8, 0) if kind == "filled" else (3, _ROWS_BEFORE)
    arrays = [(tuple(array.shape[1:]), array.dtype.name) for array in arguments.pages]
    places = places_of([_ROW] * before + arrays, blocks, packs=True)[before:]
    rows = blocks * places[0].page_rows
    if kind == "shared":
        rows = (cdiv(rows, _TILE_ROWS) + 1) * _TILE_ROWS
    num_slabs = cdiv(arguments.pages[0].shape[0], blocks)
    memory = jax.ShapeDtypeStruct((num_slabs, rows, ROW_BYTES // 4), jnp.uint32)
    return Arguments(SlabColumn(memory, places), arguments.rest)  # type: ignore[arg-type]

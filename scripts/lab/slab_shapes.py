"""Arguments of a case with its pages in slabs, as shapes, for compilation.

Flow:    settings of a compilation -> [of_case, of_slabs]; shapes of arguments + the latter -> [in_slabs] -> `Arguments`

    slabs=N      pages of a slab
    before=ROWS  of another array in every page
    rest=ROWS    of a slab behind its last page
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cases.case import Arguments
from pallas_kernels.layouts import ROW_BYTES, cdiv
from pallas_kernels.slab_pages import SlabColumn, places_of

_NAMES = ("slabs", "before", "rest")
_ROW = ((ROW_BYTES // 4,), "float32")


def of_case(settings: list[str]) -> list[str]:
    """The settings that are of the case itself."""
    return [setting for setting in settings if setting.partition("=")[0] not in _NAMES]


def of_slabs(settings: list[str]) -> dict[str, int]:
    """Numbers by name; none: pages have arrays of their own."""
    named = (setting.partition("=") for setting in settings)
    return {name: int(number) for name, _, number in named if name in _NAMES}


def in_slabs(arguments: Arguments, packs: bool, slabs: int, before: int = 0, rest: int = 0) -> Arguments:
    """The arguments with their page arrays, shapes all, in one column of slabs; each of two caches in one of its own.

    `packs`: as TPU kernels take numbers.
    """
    if packs and len(arguments.pages) > 1:
        caches = [in_slabs(Arguments((array,), None), packs, slabs, before, rest) for array in arguments.pages]
        return Arguments(tuple(cache.pages[0] for cache in caches), arguments.rest)
    arrays = [(tuple(array.shape[1:]), array.dtype.name) for array in arguments.pages]
    places = places_of([_ROW] * before + arrays, slabs, packs=packs)[before:]
    shape = (cdiv(arguments.pages[0].shape[0], slabs), slabs * places[0].page_rows + rest, ROW_BYTES // 4)
    return Arguments(SlabColumn(jax.ShapeDtypeStruct(shape, jnp.uint32), places), arguments.rest)  # type: ignore[arg-type]

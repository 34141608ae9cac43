"""Arguments of a case with its pages in slabs, as shapes, for compilation.

Flow:    settings of a compilation -> [split] -> those of the case, those of slabs;
         shapes of arguments + those of slabs -> [in_slabs] -> shapes with a `SlabColumn`

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


def split(settings: list[str]) -> tuple[list[str], dict[str, int]]:
    """(settings of a case, numbers of slabs by name; none: pages have arrays of their own)."""
    named = [(setting, *setting.partition("=")[::2]) for setting in settings]
    of_case = [setting for setting, name, _ in named if name not in _NAMES]
    return of_case, {name: int(number) for _, name, number in named if name in _NAMES}


def in_slabs(arguments: Arguments, *, slabs: int, before: int = 0, rest: int = 0) -> Arguments:
    """The arguments with their page arrays, shapes all, in one column of slabs."""
    arrays = [(tuple(array.shape[1:]), array.dtype.name) for array in arguments.pages]
    places = places_of([_ROW] * before + arrays, slabs, packs=True)[before:]
    shape = (cdiv(arguments.pages[0].shape[0], slabs), slabs * places[0].page_rows + rest, ROW_BYTES // 4)
    return Arguments(SlabColumn(jax.ShapeDtypeStruct(shape, jnp.uint32), places), arguments.rest)  # type: ignore[arg-type]

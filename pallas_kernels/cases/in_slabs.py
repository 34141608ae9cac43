"""The page arrays of a case laid into slabs, whose other words hold whatever another kind left there.

Flow:    `Arguments` with arrays of their own -> [in_slabs] -> `Arguments` with a `SlabColumn`;
         `Results` with pages in slabs -> [apart] -> `Results` with arrays of their own
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Results
from pallas_kernels.layouts import cdiv
from pallas_kernels.slab_pages import SlabColumn, places_of


def in_slabs(
    arguments: Arguments,
    rng: np.random.Generator,
    *,
    packs: bool,  # as the platform's pages do
    blocks_per_slab: int = 1,
    rest: int = 0,  # rows of a slab behind its last page
) -> Arguments:
    """The arguments with all page arrays in one column. There may be more pages than before, which nothing names."""
    arrays = [(tuple(array.shape[1:]), array.dtype.name) for array in arguments.pages]
    places = places_of(arrays, blocks_per_slab, packs=packs)
    num_pages = arguments.pages[0].shape[0]
    shape = (cdiv(num_pages, blocks_per_slab), blocks_per_slab * places[0].page_rows + rest, 128)
    column = SlabColumn(jnp.asarray(rng.integers(2**32, size=shape, dtype=np.uint32)), places)
    for i, array in enumerate(arguments.pages):
        column = column.after(column[i].at[jnp.arange(num_pages)].set(array))
    return Arguments(column, arguments.rest)  # type: ignore[arg-type]


def apart(results: Results, num_pages: int) -> Results:
    """The results with the first pages of each array in slabs as an array of its own."""
    return Results(results.outs, tuple(array[jnp.arange(num_pages)] for array in results.pages))


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """An array's bits, by which NaN equals itself."""
    array = np.asarray(x)
    return array.view(f"uint{8 * array.dtype.itemsize}") if array.dtype != bool else array


__all__ = ["apart", "bits", "in_slabs"]

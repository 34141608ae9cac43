"""What pages hold, free of how a layout packs it: entries [num_pages * entries_per_page, *entry_shape], and back.

Flow:    page arrays [n, *page_shape] of one layer -> [unpack_pages] -> entries -> [pack_entries] -> page arrays
Source:  the layouts of pallas_kernels/layouts.py, term by term

An entry is K and V of a token [heads, dim], a latent vector [dim], or a whole recurrent state, which is a page of one
entry. All functions work on what one device holds of the heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import HEAD_AXIS, ArrayLayout, PageLayout, lane_pieces
from pallas_kernels.packed_pages import kv_rows, pages_of_states, pages_of_tokens, states_of_pages, tokens_of_pages

Arrays = tuple[jax.Array, ...]


def unpack_pages(layout: PageLayout, entry_shapes: tuple[tuple[int, ...], ...], column: Arrays) -> Arrays:
    """The entries of a layer's pages, in the order of the pages: for each of `entry_shapes` an array.

    Args:
        layout: of the pages.
        entry_shapes: what one entry is made of on this device; of recurrent states numbers behind the heads count.
        column: page arrays [n, *page_shape].

    Raises:
        NotImplementedError: pages of a layout that this module does not know.
    """
    if layout.kind == "split":
        return tuple(array.reshape(-1, *array.shape[2:]) for array in column)
    if layout.kind == "recurrent":
        return tuple(map(_without_lanes, layout.arrays, entry_shapes, column))
    (array,) = column
    if layout.kind == "packed":
        (num_heads, dim), _ = entry_shapes
        rows = tokens_of_pages(array, layout.tokens_per_row, lane_pieces(dim))[:, :, : 2 * num_heads, :dim]
        rows = rows.reshape(-1, 2 * num_heads, dim)
        return rows[:, 0::2], rows[:, 1::2]
    if layout.kind == "latent":
        ((dim,),) = entry_shapes
        return (states_of_pages(array)[:, : layout.page_size, :dim].reshape(-1, dim),)
    raise NotImplementedError(f"expected pages of a known layout, got {layout.kind!r}")


def pack_entries(layout: PageLayout, page_shapes: tuple[tuple[int, ...], ...], entries: Arrays) -> Arrays:
    """Page arrays [n, *page_shape] that hold `entries`, padding zero: `unpack_pages` taken back.

    Args:
        layout: of the pages.
        page_shapes: of one page of each array on this device.
        entries: of whole pages, as `unpack_pages` gives them.

    Raises:
        NotImplementedError: pages of a layout that this module does not know.
    """
    if layout.kind == "recurrent":
        return tuple(map(_with_lanes, page_shapes, entries))
    if layout.kind == "split":
        return tuple(array.reshape(-1, *shape) for array, shape in zip(entries, page_shapes, strict=True))
    (shape,) = page_shapes
    if layout.kind == "packed":
        k, v = entries
        tokens, packing, words = layout.tokens_per_row, shape[2], shape[1] // lane_pieces(k.shape[2])
        rows = kv_rows(k, v, words * packing // tokens)
        return (pages_of_tokens(rows.reshape(-1, layout.page_size, *rows.shape[1:]), tokens, packing),)
    if layout.kind == "latent":
        (latent,) = entries
        states = latent.reshape(-1, layout.page_size, latent.shape[-1])
        if len(shape) == 2:
            return (states,)
        num_rows, pieces, packing, lanes = shape
        padding = [(0, 0), (0, num_rows * packing - states.shape[1]), (0, pieces * lanes - states.shape[2])]
        return (pages_of_states(jnp.pad(states, padding), packing),)
    raise NotImplementedError(f"expected pages of a known layout, got {layout.kind!r}")


def _without_lanes(layout: ArrayLayout, shape: tuple[int, ...], states: jax.Array) -> jax.Array:
    """States [n, *page_shape] without the padding behind their heads."""
    behind = layout.axes.index(HEAD_AXIS) + 1
    return states[(..., *map(slice, shape[behind:]))]


def _with_lanes(page_shape: tuple[int, ...], states: jax.Array) -> jax.Array:
    """States [n, *shape] with zeros behind each dimension up to that of a page."""
    return jnp.pad(states, [(0, 0), *((0, page - own) for page, own in zip(page_shape, states.shape[1:], strict=True))])

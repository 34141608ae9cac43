"""Random latent pages behind block tables, with NaN in every slot that nobody may look at."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.numbers import random_values
from pallas_kernels.latent_entries import EntryFormat, IndexFp8, LatentFp8
from pallas_kernels.layouts import PageLayout, latent_layout
from pallas_kernels.packed_pages import pages_of_states, states_of_pages


@dataclass(frozen=True)
class LatentShape:
    """Static shape of latent pages."""

    head_dim: int = 24
    page_size: int = 4
    dtype: str = "float32"
    platform: str = "cpu"

    @property
    def layout(self) -> PageLayout:
        """The layout of the pages."""
        sizes = {"head_dim": self.head_dim, "page_size": self.page_size}
        return latent_layout(**sizes, dtype=self.dtype, platform=self.platform)


def random_tables(
    rng: np.random.Generator, live: list[set[int]], num_columns: int, num_pages: int, shared_columns: int = 0
) -> np.ndarray:
    """int32[rows, num_columns]: distinct pages in random order in the `live` columns of each row, 0 elsewhere.

    In the first `shared_columns` all rows name the same pages.
    """
    tables = np.zeros((len(live), num_columns), np.int32)
    free = rng.permutation(np.arange(1, num_pages))
    common, free = free[:shared_columns], free[shared_columns:]
    for row, columns in enumerate(live):
        for column in sorted(columns):
            if column < shared_columns:
                tables[row, column] = common[column]
            else:
                tables[row, column], free = free[0], free[1:]
    return tables


def seen_slots(tables: np.ndarray, named: list[set[int]], num_pages: int, page_size: int) -> np.ndarray:
    """bool[num_pages, page_size]: slots of the states that rows name."""
    seen = np.zeros((num_pages, page_size), bool)
    for table, states in zip(tables, named, strict=True):
        for state in states:
            seen[table[state // page_size], state % page_size] = True
    return seen


def hard_tables(
    rng: np.random.Generator, named: list[set[int]], num_columns: int, page_size: int, shared_columns: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(tables int32[rows, num_columns], bool[pages, page_size] what of the pages is seen) of rows that name states.

    Pages that no state of a row is in are the null page in its table, as the managers leave them.
    """
    num_pages = 1 + len(named) * num_columns + 3
    live = [{state // page_size for state in states} for states in named]
    tables = random_tables(rng, live, num_columns, num_pages, shared_columns)
    return tables, seen_slots(tables, named, num_pages, page_size)


def by_state(pages: np.ndarray) -> np.ndarray:
    """A copy of latent pages of either layout as [pages, states, numbers], padding included."""
    return states_of_pages(pages).copy()


def with_states(pages: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Pages like `pages` that hold `states`, as `by_state` gives them."""
    return states if pages.ndim == 3 else pages_of_states(states, pages.shape[3])


def laid_out(rows: np.ndarray, shape: LatentShape, seen: np.ndarray) -> np.ndarray:
    """Pages of states [pages, page_size, head_dim] where `seen` (bool[pages, page_size]), NaN (int8: 127) elsewhere.

    Padding holds NaN too; page 0 is zero.
    """
    array = shape.layout.arrays[0]
    hidden = np.array(127 if array.dtype == "int8" else np.nan).astype(rows.dtype)
    pages = np.full(array.shape(seen.shape[0]), hidden)
    states = by_state(pages)
    states[:, : shape.page_size, : shape.head_dim] = np.where(seen[..., None], rows, hidden)
    states[0] = 0
    return with_states(pages, states)


def random_pages(rng: np.random.Generator, shape: LatentShape, seen: np.ndarray) -> np.ndarray:
    """Random states where `seen`, laid out."""
    return laid_out(random_values(rng, (*seen.shape, shape.head_dim), shape.dtype), shape, seen)


def unpacked(pages: np.ndarray, shape: LatentShape) -> np.ndarray:
    """float64[pages, page_size, head_dim] of either layout."""
    return by_state(pages)[:, : shape.page_size, : shape.head_dim].astype(np.float64)


def decoded(rows: np.ndarray, entries: EntryFormat, dim: int) -> np.ndarray:
    """float64[..., dim] of states [..., width], read byte by byte."""
    if isinstance(entries, IndexFp8):
        scale = np.ascontiguousarray(rows[..., dim:]).view(np.float32).astype(np.float64)
        return np.ascontiguousarray(rows[..., :dim]).view(np.dtype(jnp.float8_e4m3fn)).astype(np.float64) * scale
    if isinstance(entries, LatentFp8):
        nope = dim - entries.rope_dim
        numbers = np.ascontiguousarray(rows[..., :nope]).view(np.dtype(jnp.float8_e4m3fn)).astype(np.float64)
        rope = np.ascontiguousarray(rows[..., nope : nope + 2 * entries.rope_dim]).view(np.dtype(jnp.bfloat16))
        scales = rows[..., nope + 2 * entries.rope_dim :].view(np.uint8).astype(np.float64)
        for number in range(nope):
            numbers[..., number] *= 2.0 ** (scales[..., number // entries.group] - 127)
        return np.concatenate([numbers, rope.astype(np.float64)], axis=-1)
    return rows.astype(np.float64)

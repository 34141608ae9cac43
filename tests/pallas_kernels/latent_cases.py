"""Random latent pages behind block tables, with NaN in every slot that nobody may look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layouts import latent_layout
from tests.pallas_kernels.cases import random_values


@dataclass(frozen=True)
class LatentShape:
    """Static shape of latent pages."""

    head_dim: int = 24
    page_size: int = 4
    dtype: str = "float32"
    platform: str = "cpu"


def random_tables(rng: np.random.Generator, live: list[set[int]], num_columns: int, num_pages: int) -> np.ndarray:
    """int32[rows, num_columns]: distinct pages in random order in the `live` columns of each row, 0 elsewhere."""
    tables = np.zeros((len(live), num_columns), np.int32)
    free = rng.permutation(np.arange(1, num_pages))
    for row, columns in enumerate(live):
        for column in sorted(columns):
            tables[row, column], free = free[0], free[1:]
    return tables


def random_pages(rng: np.random.Generator, shape: LatentShape, seen: np.ndarray) -> np.ndarray:
    """Random pages; slots not `seen` (bool[pages, page_size]) and padding hold NaN (int8: 127), page 0 is zero."""
    layout = latent_layout(
        head_dim=shape.head_dim, page_size=shape.page_size, dtype=shape.dtype, platform=shape.platform
    )
    array = layout.arrays[0]
    values = random_values(rng, array.shape(seen.shape[0]), array.dtype)
    hidden = np.array(127 if array.dtype == "int8" else np.nan).astype(values.dtype)
    rows = values.reshape(seen.shape[0], -1, values.shape[-1])
    rows[:, : shape.page_size][~seen] = hidden
    rows[:, shape.page_size :] = hidden
    rows[..., shape.head_dim :] = hidden
    rows[0] = 0
    return rows.reshape(values.shape)


def unpacked(pages: np.ndarray, shape: LatentShape) -> np.ndarray:
    """float64[pages, page_size, head_dim] of either layout."""
    rows = pages.reshape(pages.shape[0], -1, pages.shape[-1])
    return rows[:, : shape.page_size, : shape.head_dim].astype(np.float64)

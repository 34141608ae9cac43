"""Page arrays of cases: how many, their random contents, and packed pages seen token by token."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.cases.numbers import random_array
from pallas_kernels.layouts import PageLayout, dtype_bits, lane_pieces, tokens_per_row
from pallas_kernels.packed_pages import pages_of_tokens, tokens_of_pages

# Bytes of a pool: more than a chip keeps beside its memory (a TPU's VMEM), where XLA would move a small array.
POOL_BYTES = 1 << 28


def pool_pages(layout: PageLayout, num_needed: int) -> int:
    """Pages of a pool as a server has it: those needed at least, and the null page."""
    return 1 + max(num_needed, POOL_BYTES // layout.page_bytes)


def random_pages(rng: np.random.Generator, layout: PageLayout, num_pages: int) -> tuple[jax.Array, ...]:
    """The page arrays of a layout; the null page is zero."""
    arrays = [random_array(rng, array.shape(num_pages), array.dtype) for array in layout.arrays]
    return tuple(array.at[0].set(0) for array in arrays)


def random_platform(rng: np.random.Generator, backend: str) -> str:
    """Whose pages a backend is tried on: Mosaic's kernels take their own platform's, the others any."""
    if backend in ("tpu", "gpu"):
        return "tpu" if backend == "tpu" else "cpu"
    return "tpu" if rng.random() < 0.5 else "cpu"


def whole_rows(page_size: int, num_kv_heads: int, dtype: str, platform: str) -> int:
    """`page_size`, or the next one where two tokens of a page share words."""
    is_shared = platform == "tpu" and num_kv_heads == 1 and dtype_bits(dtype) == 8
    return page_size + page_size % 2 if is_shared else page_size


def by_token(pages: np.ndarray, num_kv_heads: int, head_dim: int) -> np.ndarray:
    """A copy of packed pages as [pages, page_size, K and V of the heads, lanes]."""
    tokens = tokens_per_row(num_kv_heads, pages.shape[3])
    return tokens_of_pages(pages, tokens, lane_pieces(head_dim)).copy()


def with_tokens(pages: np.ndarray, num_kv_heads: int, tokens: np.ndarray) -> np.ndarray:
    """Packed pages like `pages` that hold `tokens`, as `by_token` gives them."""
    return pages_of_tokens(tokens, tokens_per_row(num_kv_heads, pages.shape[3]), pages.shape[3])

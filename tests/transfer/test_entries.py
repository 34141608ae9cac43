"""What pages hold, whatever their layout: entries out of pages that kv_write filled, and packed again."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transfer.entries import pack_entries, unpack_pages
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import attention_layout

PAGES, PAGE_SIZE = 3, 6


@pytest.mark.parametrize("dim", [8, 200])
@pytest.mark.parametrize(("heads", "dtype"), [(1, "int8"), (3, "int8"), (1, "bfloat16")])
def test_entries_are_what_was_written(heads: int, dtype: str, dim: int) -> None:
    """In the order of the tokens, two of which share words where one head has 8 bits; packing takes it back."""
    layout = attention_layout(num_kv_heads=heads, head_dim=dim, page_size=PAGE_SIZE, dtype=dtype, platform="tpu")
    assert layout.tokens_per_row == (2 if (heads, dtype) == (1, "int8") else 1)
    (array,) = layout.arrays
    rng, slots = np.random.default_rng(0), np.arange(PAGE_SIZE, PAGES * PAGE_SIZE, dtype=np.int32)
    new = [jnp.asarray(rng.integers(-100, 101, (slots.size, heads, dim)), jnp.float32) for _ in range(2)]
    pages = kv_write(*new, (jnp.zeros(array.shape(PAGES), dtype),), jnp.asarray(slots), backend="reference")
    entries = unpack_pages(layout, ((heads, dim),) * 2, pages)
    for given, entry in zip(new, entries, strict=True):
        np.testing.assert_array_equal(entry[PAGE_SIZE:].astype(jnp.float32), given)
    packed = pack_entries(layout, (array.page_shape,), entries)
    np.testing.assert_array_equal(packed[0].view(jnp.uint8), pages[0].view(jnp.uint8))

"""What pages hold, whatever their layout: entries out of pages that the writers filled, and packed again."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transfer.entries import pack_entries, unpack_pages
from pallas_kernels.kv_write import kv_write
from pallas_kernels.latent_write import latent_write
from pallas_kernels.layouts import attention_layout, latent_layout, recurrent_layout

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


@pytest.mark.parametrize("dim", [8, 200])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_latents_are_what_was_written(dtype: str, dim: int, platform: str) -> None:
    """In the order of the states, the last words of a page not full; packing takes it back."""
    layout = latent_layout(head_dim=dim, page_size=PAGE_SIZE, dtype=dtype, platform=platform)
    (array,) = layout.arrays
    rng, slots = np.random.default_rng(0), np.arange(PAGE_SIZE, PAGES * PAGE_SIZE, dtype=np.int32)
    new = jnp.asarray(rng.integers(-100, 101, (slots.size, dim)), jnp.float32)
    pages = (jnp.zeros(array.shape(PAGES), dtype),)
    pages = latent_write(new, pages, jnp.asarray(slots), page_size=PAGE_SIZE, backend="reference")
    (entries,) = unpack_pages(layout, ((dim,),), pages)
    np.testing.assert_array_equal(entries[PAGE_SIZE:].astype(jnp.float32), new)
    np.testing.assert_array_equal(pack_entries(layout, (array.page_shape,), (entries,))[0], pages[0])


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_states_are_sent_without_the_padding_of_a_platform(platform: str) -> None:
    """Packing gives pages of any platform: zeros behind what a TPU has in whole lanes."""
    shapes, marked = ((6, 3), (2, 5, 7), (4, 2, 7)), (1, 2)
    options = {"dtypes": ("float32",) * 3, "head_axes": (0, 0, 1), "lane_arrays": marked}
    layout = recurrent_layout(shapes=shapes, platform=platform, **options)
    rng = np.random.default_rng(0)
    states = tuple(jnp.asarray(rng.normal(size=(PAGES, *shape)), jnp.float32) for shape in shapes)
    pages = pack_entries(layout, tuple(array.page_shape for array in layout.arrays), states)
    for array, own, page in zip(layout.arrays, states, pages, strict=True):
        assert page.shape == array.shape(PAGES)
        np.testing.assert_allclose(jnp.sum(page), jnp.sum(own), rtol=1e-5)
    for own, entry in zip(states, unpack_pages(layout, shapes, pages), strict=True):
        np.testing.assert_array_equal(entry, own)

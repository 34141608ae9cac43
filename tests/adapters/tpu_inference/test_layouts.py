"""A layout's array holds K, V and latents where tpu-inference's kernels look for them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kvjax.adapters.tpu_inference import MLAv2Layout, RPAv3Hd64Layout, RPAv3Layout, SequenceOnLanesLayout
from kvjax.adapters.tpu_inference.layouts import KVLayout
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import attention_layout

PAGES, PAGE, HEADS = 3, 8, 3
LAYOUTS = (
    RPAv3Layout(PAGE, "float32", HEADS, 20),
    RPAv3Layout(PAGE, "bfloat16", HEADS, 20),
    RPAv3Hd64Layout(PAGE, "float32", HEADS),
    RPAv3Hd64Layout(PAGE, "bfloat16", HEADS),
    SequenceOnLanesLayout(PAGE, "float32", HEADS, 20),
    SequenceOnLanesLayout(PAGE, "bfloat16", HEADS, 20),
)


def whole_numbers(*shape: int, dtype: str) -> jnp.ndarray:
    """Numbers that bfloat16 holds exactly."""
    return jnp.asarray(np.random.default_rng(0).integers(-100, 100, shape), dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_packed_comes_out_again(layout: KVLayout) -> None:
    shape = (PAGES, PAGE, HEADS, layout.head_dim)
    k, v = whole_numbers(*shape, dtype=layout.dtype), -whole_numbers(*shape, dtype=layout.dtype)
    pages = layout.pack(k, v)
    assert pages.shape == layout.shape(PAGES)
    assert pages.nbytes == layout.page_bytes * PAGES
    for given, back in zip((k, v), layout.unpack(pages), strict=True):
        np.testing.assert_array_equal(given, back)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_number_stands_where_the_kernel_reads_it(layout: KVLayout) -> None:
    """Word by word, from the shapes that tpu-inference's `get_kv_cache_shape` documents."""
    page, token, head, dim = 2, 5, 1, 17
    k = jnp.zeros((PAGES, PAGE, HEADS, layout.head_dim), layout.dtype).at[page, token, head, dim].set(7)
    at = [tuple(int(i) for i in place) for place in np.argwhere(np.asarray(layout.pack(k, 0 * k), np.float32))]
    p = layout.packing
    expected = {
        RPAv3Layout: (page, token, 2 * head // p, 2 * head % p, dim),
        RPAv3Hd64Layout: (page, token, head // p, head % p, dim),
        SequenceOnLanesLayout: (page, 2 * head, dim // p, dim % p, token),
    }
    assert at == [expected[type(layout)]]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_stand_in_two_parts_of_whole_lanes(dtype: str, transposed: bool) -> None:
    page_size = 128 if transposed else 6
    layout = MLAv2Layout(page_size, dtype, lkv_dim=130, r_dim=8, transposed=transposed)
    latent = whole_numbers(2, page_size, 138, dtype=dtype)
    pages = layout.pack(latent)
    assert pages.shape == layout.shape(2)
    assert pages.nbytes == layout.page_bytes * 2
    np.testing.assert_array_equal(layout.unpack(pages), latent)
    rows = pages.swapaxes(1, 2) if transposed else pages.reshape(2, -1, 384)
    np.testing.assert_array_equal(rows[:, :page_size, 256 : 256 + 8], latent[..., 130:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rpa_v3_pages_are_those_that_kv_write_fills(dtype: str) -> None:
    layout = RPAv3Layout(PAGE, dtype, HEADS, 20)
    own = attention_layout(num_kv_heads=HEADS, head_dim=20, page_size=PAGE, dtype=dtype, platform="tpu")
    assert own.arrays[0].shape(PAGES) == layout.shape(PAGES)
    assert own.page_bytes == layout.page_bytes
    k = whole_numbers((PAGES - 1) * PAGE, HEADS, 20, dtype=dtype)
    slots = PAGE + jnp.arange(len(k), dtype=jnp.int32)  # page 0 is the null page
    written = kv_write(k, -k, (jnp.zeros(layout.shape(PAGES), dtype),), slots, backend="reference")
    for given, back in zip((k, -k), layout.unpack(written[0]), strict=True):
        np.testing.assert_array_equal(given, back[1:].reshape(given.shape))


def test_heads_are_sharded_where_they_stand() -> None:
    for layout in LAYOUTS:
        spec = layout.partition_spec("data", "model")
        place = 1 if isinstance(layout, SequenceOnLanesLayout) else 2
        assert spec == PartitionSpec("data", *("model" if i == place else None for i in range(1, 5)))
    assert MLAv2Layout(8, "bfloat16", 512, 64).partition_spec("data", "model") == PartitionSpec("data")


def test_sizes_that_a_kernel_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="expected head_dim 64, got 128"):
        RPAv3Hd64Layout(8, "bfloat16", 2, 128)
    with pytest.raises(ValueError, match="128 divides of transposed pages, got 64"):
        MLAv2Layout(64, "bfloat16", 512, 64, transposed=True)

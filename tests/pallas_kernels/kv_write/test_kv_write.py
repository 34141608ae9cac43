"""KV writes against a loop over tokens: slots, both layouts, every dtype, saturation, in place."""

from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import KV_CACHE_DTYPES, attention_layout
from tests.pallas_kernels.cases import as_bytes, random_values

PAGES, PAGE_SIZE, HEADS, DIM = 7, 4, 3, 8


def _pages(dtype: str, platform: str, seed: int = 0, num_pages: int = PAGES) -> tuple[np.ndarray, ...]:
    layout = attention_layout(num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE_SIZE, dtype=dtype, platform=platform)
    rng = np.random.default_rng(seed)
    pages = tuple(random_values(rng, array.shape(num_pages), dtype) for array in layout.arrays)
    for array in pages:
        array[0] = np.zeros((), array.dtype)
    return pages


def _loop(pages: tuple[np.ndarray, ...], k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, ...]:
    """The pages after one token's rows at a time; `k` and `v` in the pages' dtype already."""
    pages = tuple(p.copy() for p in pages)
    for t, slot in enumerate(slots):
        page, offset = divmod(int(slot), PAGE_SIZE)
        if slot < 0 or page == 0:
            continue
        if len(pages) == 2:
            pages[0][page, offset], pages[1][page, offset] = k[t], v[t]
            continue
        token = np.zeros((pages[0].shape[2] * pages[0].shape[3], pages[0].shape[4]), pages[0].dtype)
        for h in range(HEADS):
            token[2 * h, :DIM], token[2 * h + 1, :DIM] = k[t, h], v[t, h]
        pages[0][page, offset] = token.reshape(pages[0].shape[2:])
    return pages


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_writes_what_a_loop_writes(dtype: str, platform: str) -> None:
    """Random slots in any order, some skipped, some in the null page; every other slot keeps its bits."""
    rng = np.random.default_rng(3)
    pages = _pages(dtype, platform)
    slots = rng.permutation(np.arange(PAGE_SIZE, PAGES * PAGE_SIZE))[:9].astype(np.int32)
    slots[[1, 5]] = -1
    slots[[2, 7]] = [0, PAGE_SIZE - 1]
    k, v = (random_values(rng, (9, HEADS, DIM), dtype) for _ in range(2))
    new = [jnp.asarray(x).astype(jnp.float32) for x in (k, v)]
    got = jax.jit(kv_write)(*new, tuple(jnp.asarray(p) for p in pages), jnp.asarray(slots))
    expected = _loop(pages, k, v, slots)
    chex.assert_trees_all_equal_dtypes(got, expected)
    chex.assert_trees_all_equal(as_bytes(got), as_bytes(expected), strict=True)


def test_scales_divide_before_storing() -> None:
    """Pages hold K / k_scale and V / v_scale, a scale for all heads or one per head."""
    pages = tuple(jnp.asarray(p) for p in _pages("float32", "cpu"))
    rng = np.random.default_rng(4)
    k, v = (random_values(rng, (2, HEADS, DIM), "float32") for _ in range(2))
    per_head = np.array([2.0, 4.0, 0.5], np.float32)
    slots = jnp.array([4, 9], jnp.int32)
    got = kv_write(k, v, pages, slots, k_scale=jnp.float32(8), v_scale=jnp.asarray(per_head))
    np.testing.assert_array_equal(got[0][[1, 2], [0, 1]], k / 8)
    np.testing.assert_array_equal(got[1][[1, 2], [0, 1]], v / per_head[:, None])


@pytest.mark.parametrize(
    ("dtype", "largest", "nan"),
    [("float8_e4m3fn", 448.0, np.nan), ("float8_e5m2", 57344.0, np.nan), ("int8", 127.0, 0.0)],
)
def test_short_dtypes_saturate(dtype: str, largest: float, nan: float) -> None:
    """Beyond the range comes the largest finite value, infinities too; NaN stays, or is 0 where there is none."""
    values = np.zeros((1, HEADS, DIM), np.float32)
    values[0, 0] = [1e9, -1e9, np.inf, -np.inf, np.nan, 2.5, -3.5, largest]
    pages = tuple(jnp.asarray(p) for p in _pages(dtype, "cpu"))
    got = kv_write(values, values, pages, jnp.array([5], jnp.int32))
    stored = np.asarray(got[0][1, 1, 0]).astype(np.float32)
    smallest = -128.0 if dtype == "int8" else -largest
    halves = [2.0, -4.0] if dtype == "int8" else [2.5, -3.5]
    np.testing.assert_array_equal(stored, [largest, smallest, largest, smallest, nan, *halves, largest])


def test_floats_of_two_bytes_keep_infinity() -> None:
    """bfloat16 and float16 hold infinities and are not saturated."""
    pages = tuple(jnp.asarray(p) for p in _pages("bfloat16", "cpu"))
    values = jnp.full((1, HEADS, DIM), jnp.inf)
    assert np.isinf(np.asarray(kv_write(values, values, pages, jnp.array([5], jnp.int32))[0][1, 1])).all()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_donated_pages_are_written_in_place(dtype: str, platform: str) -> None:
    """The compiled module aliases every page array, holds no copy of one, and needs no memory of its size."""
    pages = tuple(jnp.asarray(p) for p in _pages(dtype, platform, num_pages=997))
    new = jnp.zeros((5, HEADS, DIM))
    write = jax.jit(lambda pages, k, v, slots: kv_write(k, v, pages, slots), donate_argnums=0)
    compiled = write.lower(pages, new, new, jnp.zeros(5, jnp.int32)).compile()
    text = compiled.as_text()
    for i in range(len(pages)):
        assert f": ({i}, {{}}, may-alias)" in text.splitlines()[0]
    assert not re.findall(r"= \S+\[997,\S* (?:copy|convert|transpose)\(", text)
    assert compiled.memory_analysis().temp_size_in_bytes < pages[0].nbytes // 4


def test_nothing_to_write() -> None:
    """All tokens skipped: the pages come back unchanged."""
    pages = tuple(jnp.asarray(p) for p in _pages("float32", "cpu"))
    new = jnp.ones((3, HEADS, DIM))
    chex.assert_trees_all_equal(kv_write(new, new, pages, jnp.full(3, -1, jnp.int32)), pages, strict=True)

"""Views that compiled TPU kernels take of memory in slabs, against a numpy model of words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.cases.in_slabs import bits
from pallas_kernels.slab_pages import SlabArray, places_of
from pallas_kernels.tpu import slab_refs
from tests.pallas_kernels.word_views import WordRef

SLABS = 3
ARRAYS = {
    "K and V": ((4, 2, 2, 128), "bfloat16"),
    "K and V of 8 bits": ((2, 4, 4, 128), "int8"),
    "scores": ((2, 8, 1, 128), "float32"),
    "states": ((2, 16, 128), "float32"),
    "states of 16 bits": ((2, 16, 128), "bfloat16"),
    "states of channels": ((256, 8), "float32"),
}


def array_of(name: str, blocks_per_slab: int, rows_before: int, rest: int) -> SlabArray:
    before = (((128,), "float32"),) * rows_before
    place = places_of([*before, ARRAYS[name]], blocks_per_slab, packs=True)[-1]
    rows = blocks_per_slab * place.page_rows
    rng = np.random.default_rng([blocks_per_slab, *name.encode()])
    memory = rng.integers(2**32, size=(SLABS, rows + -rows % 8 + rest, 128), dtype=np.uint32)
    return SlabArray(jnp.asarray(memory), place)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_refs, "is_interpreted", lambda: False)


@pytest.mark.parametrize(("blocks_per_slab", "rows_before", "rest"), [(8, 0, 0), (8, 0, 8), (1, 5, 0), (3, 5, 8)])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_kernel_finds_every_page(name: str, blocks_per_slab: int, rows_before: int, rest: int) -> None:
    """By its id or its name, whole, or the places of its first dimension that a slice names."""
    array = array_of(name, blocks_per_slab, rows_before, rest)
    assert slab_refs.operand(array) is array.memory
    ref = slab_refs.seen_by_kernel(array, WordRef(np.asarray(array.memory), np.uint32))
    expected = np.asarray(array.place.as_stored(array.whole()))
    assert ref.shape == slab_refs.seen_shape(array) == expected.shape
    names = slab_refs.page_names(array, jnp.arange(array.shape[0]))
    assert slab_refs.page_names(array, jnp.int32(-1)) < 0
    for page in range(array.shape[0]):
        np.testing.assert_array_equal(bits(ref.at[page].values), bits(expected[page]))
        np.testing.assert_array_equal(bits(slab_refs.named_page(ref, names[page]).values), bits(expected[page]))
        np.testing.assert_array_equal(bits(ref.at[page, pl.ds(1, 1)].values), bits(expected[page, 1:2]))


@pytest.mark.parametrize(("blocks_per_slab", "rows_before", "rest"), [(8, 0, 0), (3, 5, 8)])
@pytest.mark.parametrize("name", list(ARRAYS)[:3])
def test_rows_of_words_tell_where_pages_begin(name: str, blocks_per_slab: int, rows_before: int, rest: int) -> None:
    """In slabs as in an array of their own."""
    array = array_of(name, blocks_per_slab, rows_before, rest)
    ids = jnp.arange(array.shape[0])
    for pages in (array, array.whole()):
        unit = slab_refs.row_unit(pages)
        assert unit == (1 if pages is array and rows_before else array.shape[2])
        rows: Any = slab_refs.word_rows(pages, unit)
        rows = rows.whole() if isinstance(rows, SlabArray) else rows
        rows = rows.reshape(-1, *rows.shape[2:])
        for page, first in zip(ids, slab_refs.first_word_row(pages, ids), strict=True):
            found = rows[first : first + array.place.num_rows].reshape(array.shape[1:])
            np.testing.assert_array_equal(bits(found), bits(array.whole()[page]))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (array_of("K and V", 2, 0, 1), "slabs of a multiple of 8 rows, got 17"),
        (replace(x := array_of("K and V", 2, 0, 0), place=replace(x.place, packs=False)), "packed bfloat16"),
        (replace(x, place=replace(x.place, page_shape=(8, 256))), "fill rows of 128 words, got (8, 256)"),
        (replace(x, place=replace(x.place, page_shape=(5, 128))), "fill rows of 128 words, got (5, 128)"),
    ],
)
def test_what_no_kernel_sees_is_told(array: SlabArray, reason: str) -> None:
    assert reason in str(slab_refs.reason_of_slabs(array))


def test_what_kernels_see_has_no_reason() -> None:
    for pages in (array_of("K and V", 2, 0, 0), jnp.zeros((2, 3))):
        assert slab_refs.reason_of_slabs(pages) is None

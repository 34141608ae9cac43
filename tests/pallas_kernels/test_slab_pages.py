"""Arrays of pages in slabs: what is read and written there is what arrays of their own would hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.in_slabs import bits
from pallas_kernels.layouts import PageLayout, attention_layout, latent_layout, recurrent_layout
from pallas_kernels.slab_pages import PlaceInSlab, SlabArray, SlabColumn, in_one_column, places_of, rows_of

SLABS = 4
STATES_ON_TPU = {
    "states on TPU": recurrent_layout(shapes=((256, 3), (2, 8, 128)), dtypes=("bfloat16", "float32")),
    "states of channels on TPU": recurrent_layout(shapes=((128, 3), (128, 16)), dtypes=("bfloat16", "float32")),
    "narrow states on TPU": recurrent_layout(shapes=((24, 3), (2, 8, 16)), dtypes=("float32", "bfloat16")),
}
LAYOUTS = {
    "K and V in words": attention_layout(num_kv_heads=2, head_dim=16, page_size=4, dtype="bfloat16"),
    "K and V in rows": attention_layout(num_kv_heads=2, head_dim=128, page_size=4, dtype="float32"),
    "K and V of 8 bits": attention_layout(num_kv_heads=1, head_dim=36, page_size=3, dtype="float8_e4m3fn"),
    "K and V within words": attention_layout(num_kv_heads=1, head_dim=3, page_size=3, dtype="bfloat16"),
    "packed K and V": attention_layout(num_kv_heads=2, head_dim=256, page_size=4, dtype="bfloat16", platform="tpu"),
    "packed, 8 bits": attention_layout(num_kv_heads=2, head_dim=64, page_size=4, dtype="int8", platform="tpu"),
    "two tokens a row": attention_layout(num_kv_heads=1, head_dim=64, page_size=4, dtype="int8", platform="tpu"),
    "latents": latent_layout(head_dim=40, page_size=4, dtype="bfloat16"),
    "packed latents": latent_layout(head_dim=192, page_size=5, dtype="bfloat16", platform="tpu"),
    "states": recurrent_layout(shapes=((24, 3), (2, 8, 16)), dtypes=("bfloat16", "float32")),
    **STATES_ON_TPU,
}


def places_of_layout(layout: PageLayout, blocks_per_slab: int) -> tuple[PlaceInSlab, ...]:
    arrays = [(array.page_shape, array.dtype) for array in layout.arrays]
    return places_of(arrays, blocks_per_slab, packs=layout.platform == "tpu" or layout in STATES_ON_TPU.values())


def column_of(layout: PageLayout, rng: np.random.Generator, blocks_per_slab: int, rest: int = 3) -> SlabColumn:
    """Of random bits: what another kind left there."""
    places = places_of_layout(layout, blocks_per_slab)
    rows = blocks_per_slab * places[0].page_rows + rest
    return SlabColumn(jnp.asarray(rng.integers(2**32, size=(SLABS, rows, 128), dtype=np.uint32)), places)


def random_numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


@pytest.mark.parametrize("blocks_per_slab", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_are_written_and_read_as_in_arrays_of_their_own(name: str, blocks_per_slab: int) -> None:
    """Every array in turn: the others, the rest of a slab and pages that are not named keep their bits."""
    rng = np.random.default_rng([blocks_per_slab, *name.encode()])
    column = column_of(LAYOUTS[name], rng, blocks_per_slab)
    apart = [np.array(array.whole()) for array in column]
    for i, array in enumerate(column):
        assert (array.shape, array.dtype) == (apart[i].shape, apart[i].dtype)
        num_pages = array.shape[0]
        ids = rng.permutation(num_pages + 2)[:5]  # of them perhaps some beyond the last: dropped
        values = random_numbers(rng, (5, *array.shape[1:]), array.dtype)
        before = np.array(column.memory)
        column = column.after(column[i].at[jnp.asarray(ids)].set(jnp.asarray(values), mode="drop"))
        for page, value in zip(ids, values, strict=True):
            if page < num_pages:
                apart[i][page] = value
        for found, expected in zip(column, apart, strict=True):
            np.testing.assert_array_equal(bits(found.whole()), bits(expected))
            np.testing.assert_array_equal(bits(found[jnp.arange(num_pages)]), bits(expected))
        untouched = np.setdiff1d(np.arange(SLABS), ids // blocks_per_slab)
        np.testing.assert_array_equal(before[untouched], np.asarray(column.memory)[untouched])
        end = blocks_per_slab * array.place.page_rows
        np.testing.assert_array_equal(before[:, end:], np.asarray(column.memory)[:, end:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_places_in_pages_are_written_and_read_as_in_arrays_of_their_own(name: str) -> None:
    """Some do not begin or end with a word."""
    rng = np.random.default_rng([7, *name.encode()])
    column = column_of(LAYOUTS[name], rng, 2)
    for i, place in enumerate(column.places):
        apart, slots = np.array(column[i].whole()), place.page_shape[0]
        num_pages = apart.shape[0]
        chosen = rng.permutation(num_pages * slots)[:6]
        page, slot = chosen // slots, chosen % slots
        values = random_numbers(rng, (6, *place.page_shape[1:]), apart.dtype)
        page[0] = num_pages  # dropped
        apart[page[1:], slot[1:]] = values[1:]
        given = (jnp.asarray(page), jnp.asarray(slot))
        column = column.after(column[i].at[given].set(jnp.asarray(values), mode="drop"))
        np.testing.assert_array_equal(bits(column[i].whole()), bits(apart))
        found = column[i].at[jnp.asarray(page[1:]), jnp.asarray(slot[1:])].get()
        np.testing.assert_array_equal(bits(found), bits(apart[page[1:], slot[1:]]))


def test_rows_of_words_hold_packed_numbers_lowest_bits_first() -> None:
    """As a TPU kernel sees them, which takes a row of words for `packing` rows of numbers."""
    layout = attention_layout(num_kv_heads=1, head_dim=128, page_size=2, dtype="bfloat16", platform="tpu")
    (place,) = places_of_layout(layout, 1)
    numbers = jnp.arange(2 * 2 * 128, dtype=jnp.float32).astype(jnp.bfloat16).reshape(1, 2, 1, 2, 128)
    array = SlabArray(jnp.zeros((2, 2, 128), jnp.uint32), place).at[jnp.array([1])].set(numbers)
    k, v = np.asarray(numbers).view(np.uint16).astype(np.uint32)[0, :, 0].swapaxes(0, 1)
    np.testing.assert_array_equal(np.asarray(array.memory[1]), k | v << 16)


def test_channels_of_states_are_lanes_on_tpu() -> None:
    """As kernels take them: 128 channels in a row, all numbers of these channels before those of the next."""
    (place,) = places_of([((256, 3), "float32")], 1, packs=True)
    states = jnp.arange(256 * 3, dtype=jnp.float32).reshape(1, 256, 3)
    array = SlabArray(jnp.zeros((2, 8, 128), jnp.uint32), place).at[jnp.array([1])].set(states)
    rows = np.asarray(array.memory[1, :6]).view(np.float32).reshape(2, 3, 128)
    np.testing.assert_array_equal(rows, np.asarray(states).reshape(2, 128, 3).swapaxes(1, 2))


def test_a_jitted_loop_that_is_given_the_memory_changes_it_in_place() -> None:
    layout = attention_layout(num_kv_heads=2, head_dim=64, page_size=4, dtype="bfloat16")
    column = column_of(layout, np.random.default_rng(0), 2)

    def step(column: SlabColumn) -> SlabColumn:
        def one(i: jax.Array, array: SlabArray) -> SlabArray:
            return array.at[i[None]].set(array[i[None] + 1] * 2)

        return column.after(jax.lax.fori_loop(1, 4, one, column[0]))

    compiled = jax.jit(step, donate_argnums=0).lower(column).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == column.memory.nbytes
    assert memory.temp_size_in_bytes < column.memory.nbytes


@pytest.mark.parametrize(("dtype", "in_a_row"), [("float32", 128), ("bfloat16", 256), ("int8", 512)])
def test_rows_are_filled_to_the_last_number(dtype: str, in_a_row: int) -> None:
    counts = (1, in_a_row, in_a_row + 1, 9 * in_a_row, 9 * in_a_row + 1)
    assert [rows_of(count, dtype) for count in counts] == [1, 1, 2, 9, 10]


def test_arrays_of_one_memory_are_a_column_and_others_a_tuple() -> None:
    """Arrays of a column come back as it; of two memories, or beside an array of its own, they stay apart."""
    places = places_of([((2, 4), "float32"), ((3,), "float32")], 1, packs=False)
    memory = jnp.zeros((4, 2, 128), jnp.uint32)
    first, second = SlabArray(memory, places[0]), SlabArray(memory, places[1])
    column = in_one_column((first, second))
    assert isinstance(column, SlabColumn)
    assert column.memory is memory
    assert column.places == places
    other = SlabArray(memory + 1, places[1])
    for arrays in ((first, other), (first, jnp.zeros((4, 3)))):
        apart = in_one_column(arrays)
        assert isinstance(apart, tuple)
        assert all(x is y for x, y in zip(apart, arrays, strict=True))

"""Work on whole pages agrees with numpy, skips padding and the null page, and happens in place."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest

from kvjax.device import KVPages, copy_pages, create_pages, gather_pages, scatter_pages, write_kv, zero_pages
from kvjax.device.pages.page_ops import (
    copy_pages_padded,
    gather_pages_padded,
    pad_ids,
    scatter_pages_padded,
    write_own_kv,
    zero_pages_padded,
)
from tests.device.aliases import assert_in_place
from tests.device.toy import HEAD_DIM, KV_HEADS, toy_config

NUM_PAGES = 600
PLATFORMS = pytest.mark.parametrize("platform", ["cpu", "tpu"])


def filled_pages(platform: str = "cpu", seed: int = 0) -> tuple[KVPages, list[np.ndarray]]:
    """Random pages but for page 0, and the same as numpy arrays."""
    rng = np.random.default_rng(seed)
    pages = create_pages(toy_config(NUM_PAGES, platform))
    arrays = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in jax.tree.leaves(pages)]
    for array in arrays:
        array[0] = 0
    treedef = jax.tree.structure(pages)
    return jax.tree.unflatten(treedef, [jax.device_put(array.copy()) for array in arrays]), arrays


def assert_equal(pages: KVPages, arrays: list[np.ndarray]) -> None:
    chex.assert_trees_all_equal(jax.tree.leaves(pages), arrays, strict=True)


@PLATFORMS
@pytest.mark.parametrize("count", [0, 1, 8, 9, 150])
def test_copies_and_zeroing_agree_with_numpy(platform: str, count: int) -> None:
    """Lists longer than the longest padded length go in pieces."""
    pages, arrays = filled_pages(platform)
    ids = np.random.default_rng(count).permutation(np.arange(1, NUM_PAGES))
    sources, destinations, zeroed = ids[:count], ids[count : 2 * count], ids[2 * count : 3 * count]
    sources[: count // 2] = sources[:1].sum()  # one page may be copied to many
    pages = zero_pages(copy_pages(pages, 0, sources, destinations), 0, zeroed)
    for array in arrays:
        array[destinations] = array[sources]
        array[zeroed] = 0
    assert_equal(pages, arrays)


@PLATFORMS
def test_gathered_pages_can_be_scattered_to_other_pages(platform: str) -> None:
    pages, arrays = filled_pages(platform)
    gathered = gather_pages(pages, 0, np.array([5, 0, 7]))
    padded = [array[[5, 0, 7, 0, 0, 0, 0, 0]] for array in arrays]
    chex.assert_trees_all_equal(jax.tree.leaves(gathered), padded, strict=True)
    pages = scatter_pages(pages, 0, np.array([9, 2, 1]), gathered)
    for array in arrays:
        array[[9, 2, 1]] = array[[5, 0, 7]]
    assert_equal(pages, arrays)


@PLATFORMS
def test_padding_and_the_null_page_are_never_written(platform: str) -> None:
    pages, arrays = filled_pages(platform)
    nothing, null = pad_ids(np.array([], np.int64)), np.zeros(8, np.int32)
    for ids in (nothing, null):
        pages = copy_pages_padded(pages, 0, np.arange(1, 9, dtype=np.int32), ids)
        pages = zero_pages_padded(pages, 0, ids)
        pages = scatter_pages_padded(pages, 0, ids, gather_pages_padded(pages, 0, np.full(8, 3, np.int32)))
    assert_equal(pages, arrays)


@PLATFORMS
def test_kv_is_written_to_slots_of_one_column(platform: str) -> None:
    pages, arrays = filled_pages(platform)
    k, v = np.random.default_rng(1).normal(size=(2, 4, KV_HEADS, HEAD_DIM)).astype(np.float32)
    pages = write_kv(pages, 0, 1, k, v, np.array([9, -1, 3, 16], np.int32))  # 3 is a slot of page 0
    rows = np.stack([k, v], axis=2).reshape(4, 2 * KV_HEADS, HEAD_DIM)
    for line, (page, offset) in ((0, (2, 1)), (3, (4, 0))):
        if platform == "cpu":
            arrays[2][page, offset], arrays[3][page, offset] = k[line], v[line]
        else:
            arrays[1][page, offset] = 0
            arrays[1][page, offset, :, 0, :HEAD_DIM] = rows[line]
    assert_equal(pages, arrays)


@PLATFORMS
def test_everything_that_returns_pages_works_in_place(platform: str) -> None:
    pages, _ = filled_pages(platform)
    ids = pad_ids(np.array([1, 2]))
    values = gather_pages_padded(pages, 0, ids)
    kv = np.zeros((4, KV_HEADS, HEAD_DIM), np.float32)
    lowered = {
        copy_pages_padded: copy_pages_padded.lower(pages, 0, ids, ids),
        zero_pages_padded: zero_pages_padded.lower(pages, 0, ids),
        scatter_pages_padded: scatter_pages_padded.lower(pages, 0, ids, values),
        write_own_kv: write_own_kv.lower(pages, 0, 1, kv, kv, np.zeros(4, np.int32)),
    }
    for program in lowered.values():
        assert_in_place(program.compile(), pages)


def test_refuses_ids_and_values_that_cannot_be() -> None:
    pages, arrays = filled_pages()
    values = gather_pages(pages, 0, np.array([1]))
    with pytest.raises(ValueError, match=r"expected page ids in \[1, 600\), got 0 to 3"):
        zero_pages(pages, 0, np.array([3, 0]))
    with pytest.raises(ValueError, match=r"expected page ids in \[0, 600\), got 1 to 600"):
        gather_pages(pages, 0, np.array([1, 600]))
    with pytest.raises(ValueError, match=r"expected page ids in \[1, 600\), got -1 to -1"):
        scatter_pages(pages, 0, np.array([-1]), values)
    with pytest.raises(ValueError, match=r"expected values padded to 64 pages, got \[8\]"):
        scatter_pages(pages, 0, np.arange(1, 20), values)
    with pytest.raises(ValueError, match="expected at most 64 page ids a call, got 65"):
        gather_pages(pages, 0, np.arange(65))
    assert_equal(pages, arrays)

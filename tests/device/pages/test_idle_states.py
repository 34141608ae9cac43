"""States kept in fewer bits come back within half a step of their scale, and moves touch nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.pool.page_edits import NO_COPIES, PageCopies
from kvjax.core.step.step_plan import IdleStateMoves
from kvjax.device import KVPages, create_pages
from kvjax.device.pages.idle_states import (
    check_moves,
    dequantized,
    load_idle_states,
    quantized,
    store_idle_states,
    warm_up_moves,
)
from kvjax.nnx import PagedKVCache
from kvjax.planning import plan_kv_cache, with_idle_states
from pallas_kernels.slab_pages import replaced

HEADS, ROWS, COLUMNS = 4, 6, 10
STATE = MambaSpec(
    block_size=4,
    shapes=((12, 3), (HEADS, ROWS, COLUMNS)),
    dtypes=("bfloat16", "float32"),
    mamba_cache_mode="align",
)
FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
RUNNING, IDLE = 0, 1  # pools
COUNTS = (2, 4)


def random_states(num: int, seed: int = 0) -> np.ndarray:  # float32[num, heads, rows, columns]
    """Heads of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 6, (num, HEADS, 1, 1))
    return (sizes * rng.normal(size=(num, HEADS, ROWS, COLUMNS))).astype(np.float32)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("kept_as", ["float32", "bfloat16"])
def test_a_head_comes_back_within_half_a_step(dtype: str, kept_as: str) -> None:
    states = random_states(20)
    integers, scales = quantized(jnp.asarray(states), jnp.dtype(dtype))
    back = np.asarray(dequantized(integers, scales, jnp.dtype(kept_as)), np.float32)
    steps = np.abs(states).max((2, 3)) / np.iinfo(dtype).max
    np.testing.assert_allclose(scales, steps, rtol=1e-6)
    assert integers.dtype == dtype
    rounding = np.abs(states) * (2.0**-8 if kept_as == "bfloat16" else 1e-6)
    assert (np.abs(back - states) <= 0.5001 * steps[:, :, None, None] + rounding).all()


def test_zeros_stay_zeros_and_nan_stays_in_its_head() -> None:
    states = random_states(1)
    states[0, 1], states[0, 2, 3, 4] = 0.0, np.nan
    back = np.asarray(dequantized(*quantized(jnp.asarray(states), jnp.dtype("int8")), jnp.dtype("float32")))
    assert (back[0, 1] == 0).all()
    assert np.isnan(back[0, 2]).all()
    assert np.isfinite(back[0, [0, 1, 3]]).all()


def idle_pages(one_memory: bool) -> KVPages:
    """Pages of 4 layers of states and one of attention, each number of which is something else."""
    specs = with_idle_states({**{f"s.{i}": STATE for i in range(4)}, "a": FULL}, "int8")
    plan = plan_kv_cache(specs, max_model_len=40, memory_bytes=100_000, one_memory=one_memory)
    pages = create_pages(plan.config)
    keys = iter(range(100))

    def fill(array: jax.Array) -> jax.Array:
        bits = jax.random.bits(jax.random.key(next(keys)), array.shape, f"uint{8 * array.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(bits, array.dtype).at[0].set(0)

    return jax.tree.map(fill, pages)


def plan_of(loads: PageCopies = NO_COPIES, stores: PageCopies = NO_COPIES) -> Any:
    return SimpleNamespace(idle_states=(IdleStateMoves(RUNNING, IDLE, loads, stores),))


def numbers(pages: KVPages) -> list[list[list[np.ndarray]]]:
    """By pool, column and array, as bytes: NaN equals itself."""
    return [
        [[np.asarray(array[jnp.arange(array.shape[0])]).copy() for array in column] for column in pool]
        for pool in pages.pools
    ]


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_moves_agree_with_numpy_and_touch_nothing_else(one_memory: bool, count: int) -> None:
    pages = idle_pages(one_memory)
    sizes = [pages.num_pages(pool_id) for pool_id in (RUNNING, IDLE)]
    sources, destinations = (np.arange(1, 1 + count, dtype=np.int32) for _ in sizes)
    if one_memory:  # pages of other slabs than those that are read
        destinations = (sizes[IDLE] - 1 - np.arange(count)).astype(np.int32)
    states = random_states(count, seed=1)
    column = pages.column(RUNNING, 0)
    pages = pages.with_column(RUNNING, 0, replaced(column, 1, column[1].at[sources].set(states)))
    before = numbers(pages)
    pages = store_idle_states(pages, [plan_of(stores=PageCopies(sources, destinations))], COUNTS)
    after = numbers(pages)
    integers, scales = quantized(jnp.asarray(states), jnp.dtype("int8"))
    np.testing.assert_array_equal(after[IDLE][0][1][destinations], integers)
    np.testing.assert_array_equal(after[IDLE][0][2][destinations], scales)
    for place in range(len(before[RUNNING])):
        conv = before[RUNNING][place][0][sources].view(np.uint16)
        np.testing.assert_array_equal(after[IDLE][place][0][destinations].view(np.uint16), conv)
    pages = load_idle_states(pages, [plan_of(loads=PageCopies(destinations, sources))], COUNTS)
    loaded = numbers(pages)
    np.testing.assert_array_equal(loaded[RUNNING][0][1][sources], dequantized(integers, scales, jnp.dtype("float32")))
    if not one_memory:  # in slabs pages of other pools lie in the same bytes
        for pool_id, moved in ((RUNNING, sources), (IDLE, destinations), (2, [])):
            for own, other in zip(jax.tree.leaves(before[pool_id]), jax.tree.leaves(loaded[pool_id]), strict=True):
                kept = np.setdiff1d(np.arange(len(own)), moved)
                np.testing.assert_array_equal(own[kept].view(np.uint8), other[kept].view(np.uint8))


def test_warm_up_changes_nothing() -> None:
    pages = idle_pages(one_memory=False)
    before = numbers(pages)
    after = numbers(warm_up_moves(pages, [(RUNNING, IDLE)], COUNTS))
    jax.tree.map(
        lambda own, other: np.testing.assert_array_equal(own.view(np.uint8), other.view(np.uint8)), before, after
    )


def test_pages_that_cannot_be_moved_are_refused() -> None:
    pages = idle_pages(one_memory=False)
    one, null, beyond = (np.array([page], np.int32) for page in (1, 0, pages.num_pages(IDLE)))
    for plan, message in (
        (plan_of(loads=PageCopies(one, null)), r"expected pages of moved states in \[1, "),
        (plan_of(stores=PageCopies(one, beyond)), r"expected pages of moved states in \[1, "),
        (plan_of(loads=PageCopies(beyond, one)), r"expected states to move in \[0, "),
    ):
        with pytest.raises(ValueError, match=message):
            check_moves(pages, plan)


def test_a_module_of_pages_has_no_idle_states() -> None:
    config = plan_kv_cache(with_idle_states({"s": STATE, "a": FULL}, "int8"), max_model_len=40, num_blocks=20).config
    with pytest.raises(NotImplementedError, match="plan without them"):
        PagedKVCache(config)

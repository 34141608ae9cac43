"""kvjax.device.mesh.aligned: a device of JAX's CPU backend takes such arrays without a copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.device.mesh.aligned import ALIGNMENT, RecycledMemory, aligned_empty

SIZE = 1 << 14


@pytest.mark.parametrize("shape", [(0, 3), (1,), (5, 7), (64, 1000)])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_device_reads_the_same_memory(shape: tuple[int, ...], dtype: str) -> None:
    array = aligned_empty(shape, dtype)
    array[...] = 3
    taken = jax.device_put(array, jax.devices("cpu")[0])
    assert taken.shape == shape
    assert taken.dtype == dtype
    np.testing.assert_array_equal(taken, array)
    if array.size:
        assert taken.unsafe_buffer_pointer() == array.ctypes.data


def test_two_arrays_share_no_memory() -> None:
    assert not np.shares_memory(aligned_empty((64,)), aligned_empty((64,)))


def test_memory_serves_again_once_no_view_is_left() -> None:
    memory = RecycledMemory(4 * SIZE)
    array = memory.empty((2, SIZE // 8), "float32")
    view, where = array[1:].view(np.uint8), array.ctypes.data
    assert where % ALIGNMENT == 0
    del array
    assert memory.empty((SIZE,)).ctypes.data != where
    del view
    assert where in {one.ctypes.data for one in (memory.empty((SIZE,)), memory.empty((SIZE,)))}
    assert memory.empty((0, 3)).shape == (0, 3)


def test_no_more_idle_memory_is_kept_than_asked_for() -> None:
    memory = RecycledMemory(3 * SIZE)
    arrays = [memory.empty((SIZE,)) for _ in range(5)]
    places = {array.ctypes.data for array in arrays}
    assert len(places) == 5
    arrays.clear()
    assert memory._idle_bytes == 3 * SIZE == sum(one.nbytes for one in memory._idle[SIZE])


def test_a_device_that_still_reads_keeps_its_memory() -> None:
    """Arrays are dropped as soon as work on them is dispatched, and what comes next is overwritten."""
    memory, device = RecycledMemory(64 * SIZE), jax.devices("cpu")[0]
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, y: y + jnp.sum(x * 0) + x, jnp.zeros_like(x)))
    results = []
    for turn in range(30):
        array = memory.empty((SIZE // 4,), "float32")
        array[...] = turn
        taken = jax.device_put(array, device)
        results.append(work(taken))
        del array, taken
    for turn, result in enumerate(results):
        np.testing.assert_array_equal(result, np.full(SIZE // 4, 20.0 * turn, np.float32))

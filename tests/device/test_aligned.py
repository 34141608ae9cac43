"""kvjax.device.aligned: a device of JAX's CPU backend takes such arrays without a copy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.device.aligned import aligned_empty


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

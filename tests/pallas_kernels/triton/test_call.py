"""What Triton kernels of all families share: sizes that are powers of two, and numbers of 8 bits by their bits."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.triton import call
from pallas_kernels.triton.call import LEAST, numbers, power_from, powers
from pallas_kernels.triton.walks import reason_not_supported
from tests.pallas_kernels.cases import Shape, make_case


@pytest.mark.parametrize("size", [1, 8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 512, 576])
def test_parts_are_powers_of_two_and_hold_each_number_once(size: int) -> None:
    parts = powers(7, size)
    held = [n for part in parts for n in range(part.first, part.first + part.size)]
    assert held == list(range(7, 7 + size))
    for part in parts:
        assert part.room >= LEAST
        assert part.room & (part.room - 1) == 0
        assert part.is_whole == (part.size == part.room)
    assert sum(part.room - part.size for part in parts) < LEAST


def test_the_next_power_of_two() -> None:
    assert [power_from(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_float_of_8_bits_is_itself(name: str, dtype: str) -> None:
    """All 256: subnormal ones, both zeros, infinities, NaN."""
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name))
    found = np.asarray(numbers(jnp.asarray(every), jnp.dtype(dtype)).astype(jnp.float32))
    np.testing.assert_array_equal(found, every.astype(np.float32))


def test_calls_that_it_cannot_take_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed pages of keys and values; arrays whose entries 31 bits do not count; a jax that has it no more."""
    case = make_case(0, Shape(platform="tpu"), [(1, 3)])
    with pytest.raises(NotImplementedError, match="Triton kernels read split K and V pages, got packed ones"):
        ragged_paged_attention(*case.arrays, sm_scale=1.0, backend="triton")
    assert "entries of arrays" in str(
        reason_not_supported((np.lib.stride_tricks.as_strided(np.int8(0), (2**31 + 1,), (0,)),))
    )
    monkeypatch.setattr(call, "plt", None)
    assert call.reason_without_triton() == "this version of jax has no Pallas Triton"

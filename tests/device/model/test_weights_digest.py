"""Digests of weights: every bit, place, name, shape and dtype counts; how they lie on devices does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.device.model.weights_digest import leaves_digest

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int4", "uint4", "bool", "int32", "complex64")


def random_array(rng: np.random.Generator, dtype: str) -> np.ndarray:
    shape = tuple(rng.integers(1, 7, rng.integers(0, 4)))
    return np.asarray(rng.integers(0, 2, shape) if dtype == "bool" else rng.normal(size=shape) * 5).astype(
        jnp.dtype(dtype)
    )


def with_another(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """The array with the bits of one number changed."""
    changed = array.copy().reshape(-1)
    place = rng.integers(changed.size)
    values = [value for value in np.arange(2).astype(array.dtype) if value != changed[place]]
    changed[place] = values[0]
    return changed.reshape(array.shape)


@pytest.mark.parametrize("seed", range(20))
def test_one_number_or_two_that_change_places_make_another_digest(seed: int) -> None:
    """For certain where one number differs; two of different value have other places, and hash otherwise there."""
    rng = np.random.default_rng(seed)
    for dtype in DTYPES:
        array = random_array(rng, dtype)
        digest = leaves_digest([("a", array)])
        assert leaves_digest([("a", jnp.asarray(array))]) == digest
        assert leaves_digest([("a", with_another(rng, array))]) != digest, dtype
        turned = array.reshape(-1)[::-1].reshape(array.shape)
        assert (leaves_digest([("a", turned)]) == digest) == (turned.tobytes() == array.tobytes()), dtype


def test_names_shapes_and_dtypes_count() -> None:
    zeros = np.zeros((2, 3), np.float32)
    leaves = [
        [("a", zeros)],
        [("b", zeros)],
        [("a", zeros.T)],
        [("a", zeros.reshape(-1))],
        [("a", zeros.astype(np.int32))],
        [("a", zeros.astype(np.float16))],
        [("a", zeros[:1])],
        [("a", zeros[:0])],
        [("a", zeros), ("b", zeros)],
        [("b", zeros), ("a", zeros)],
        [],
    ]
    assert len({leaves_digest(one) for one in leaves}) == len(leaves)


def test_the_sign_of_zero_and_the_bits_of_nan_count() -> None:
    words = np.array([0, 0x80000000, 0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert len({leaves_digest([("a", word)]) for word in words[:, None]}) == 4


def test_random_keys_count_by_their_numbers() -> None:
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0)]
    digests = [leaves_digest([("key", key)]) for key in keys]
    assert digests[0] == digests[2] != digests[1]

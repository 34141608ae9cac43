"""Formats of entries against numpy that reads the bytes one field after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cases.latents import decoded
from pallas_kernels.latent_entries import IndexFp8, LatentFp8, Plain

LATENT = LatentFp8(rope_dim=8, group=16)


def vectors(seed: int, dim: int) -> np.ndarray:
    """Of very different sizes, zeros and signed zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, dim)) * 10.0 ** rng.integers(-36, 30, (40, 1))
    x[0], x[1] = 0, -0.0
    x[2, ::2] = 0
    return x.astype(np.float32)


def test_widths_of_deepseek_v4() -> None:
    assert (LatentFp8().width(512), IndexFp8().width(128), Plain().width(512)) == (584, 132, 512)


@pytest.mark.parametrize(("entries", "dim"), [(LATENT, 40), (LatentFp8(), 512), (IndexFp8(), 24)], ids=str)
def test_bytes_read_back(entries: LatentFp8 | IndexFp8, dim: int) -> None:
    """Decoding is numpy's reading of the bytes, and is within half a step of e4m3 of what was encoded."""
    x = vectors(dim, dim)
    raw = np.asarray(jax.jit(entries.encode)(x))
    assert (raw.dtype, raw.shape) == (np.int8, (40, entries.width(dim)))
    got = np.asarray(jax.jit(entries.decode, static_argnums=1)(raw, dim))
    np.testing.assert_array_equal(got, decoded(raw, entries, dim).astype(np.float32))
    rope = entries.rope_dim if isinstance(entries, LatentFp8) else 0
    group = entries.group if isinstance(entries, LatentFp8) else dim
    groups, wrong = (a[:, : dim - rope].reshape(40, -1, group) for a in (x, got - x))
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    assert (np.abs(wrong) <= np.maximum(np.abs(groups) / 16, largest / 448)).all()
    np.testing.assert_array_equal(got[:, dim - rope :], x[:, dim - rope :].astype(ml_dtypes.bfloat16))


def test_scales_are_the_smallest_powers_of_two() -> None:
    """A group whose largest number is 448 times a power of two has that power as its scale, one above has the next."""
    x = np.zeros((3, 24), np.float32)
    x[:, 0] = 448 * 2.0**-5, np.nextafter(np.float32(448 * 2.0**-5), np.float32(np.inf)), 1e-37
    raw = np.asarray(LATENT.encode(jnp.asarray(x))).view(np.uint8)
    assert raw[:, 16 + 16].tolist() == [127 - 5, 127 - 4, 1]


def test_entries_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="expected 8 numbers and a multiple of 16 more in an entry, got 32"):
        LATENT.width(32)
    with pytest.raises(ValueError, match=r"expected 8 numbers .* got 8"):
        LATENT.width(8)

"""Laws of latent_write: a state lands in its slot, whatever the layout, and nowhere else."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_entries import IndexFp8
from pallas_kernels.latent_write import latent_write
from tests.pallas_kernels.cases import random_values
from tests.pallas_kernels.latent_cases import LatentShape, random_pages, unpacked

NUM_PAGES = 6


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("dtype", "page_size"), [("float32", 4), ("bfloat16", 5), ("float8_e5m2", 6), ("int8", 2)])
def test_states_land_in_their_slots(dtype: str, page_size: int, platform: str) -> None:
    """Against a loop over states; -1 and slots of page 0 are skipped, all other bytes stay."""
    shape = LatentShape(24, page_size, dtype, platform)
    rng = np.random.default_rng(page_size)
    before = random_pages(rng, shape, np.ones((NUM_PAGES, page_size), bool))
    states = random_values(rng, (9, 24), "float32") * 30
    slots = rng.permutation(np.arange(page_size, NUM_PAGES * page_size))[:9].astype(np.int32)
    slots[2], slots[5] = -1, page_size - 1
    (after,) = latent_write(
        jnp.asarray(states), (jnp.asarray(before),), jnp.asarray(slots), scale=jnp.float32(2), page_size=page_size
    )
    expected = unpacked(before, shape)
    for state, slot in zip(states.astype(np.float64), slots, strict=True):
        if slot >= page_size:
            limit = 127 if dtype == "int8" else float(jnp.finfo(dtype).max)
            value = np.clip(state / 2, -limit - (dtype == "int8"), limit)
            value = np.round(value) if dtype == "int8" else np.asarray(jnp.asarray(value, jnp.dtype(dtype)))
            expected[slot // page_size, slot % page_size] = value
    np.testing.assert_array_equal(unpacked(np.asarray(after), shape), expected)
    assert after.dtype == before.dtype


def test_entries_are_encoded() -> None:
    """What is written is what the format makes of the states."""
    states = jnp.asarray(random_values(np.random.default_rng(0), (3, 24), "float32"))
    pages = (jnp.zeros((NUM_PAGES, 4, 28), jnp.int8),)
    (after,) = latent_write(states, pages, jnp.array([4, -1, 9], jnp.int32), entries=IndexFp8())
    raw = IndexFp8().encode(states)
    np.testing.assert_array_equal(after, pages[0].at[1, 0].set(raw[0]).at[2, 1].set(raw[2]))


GOOD: dict[str, Any] = {
    "states": jnp.zeros((3, 24)),
    "pages": (jnp.zeros((NUM_PAGES, 4, 24)),),
    "slot_mapping": jnp.array([4, -1, 9], jnp.int32),
}
BAD = {
    "backend": ({"backend": "x"}, "latent_write: expected backend out of .*, got 'x'"),
    "rank": ({"states": jnp.zeros(24)}, r"expected states \[num_states, dim\] of shape .* got \(24,\)"),
    "dtype": ({"states": jnp.zeros((3, 24), jnp.int8)}, "expected states of dtype float32, .* got int8"),
    "dim": ({"states": jnp.zeros((3, 20))}, r"expected pages\[0\] \[pages, page_size, 20\] or .*, got \(6, 4, 24\)"),
    "slots": ({"slot_mapping": jnp.array([4, -1], jnp.int32)}, r"slot_mapping .* of shape \(3\), got \(2,\)"),
    "slots_dtype": ({"slot_mapping": jnp.zeros(3)}, "expected slot_mapping of dtype int32, got float32"),
    "slots_far": ({"slot_mapping": jnp.array([4, -1, 24], jnp.int32)}, r"slots in \[-1, 24\), got -1 \.\.\. 24"),
    "slots_twice": ({"slot_mapping": jnp.array([4, -1, 4], jnp.int32)}, "one token per slot, got two for slot 4"),
    "scale_fp8": (
        {"scale": jnp.float32(1), "entries": IndexFp8(), "pages": (jnp.zeros((NUM_PAGES, 4, 28), jnp.int8),)},
        r"expected scale None, since entries IndexFp8\(\) have scales of their own",
    ),
    "entries": ({"entries": IndexFp8()}, r"expected pages\[0\] \[pages, page_size, 28\] or .*, got \(6, 4, 24\)"),
    "scale": ({"scale": jnp.ones(3)}, r"expected scale of shape \(\), got \(3,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        latent_write(**{**GOOD, **change})


def test_on_gpu_xla_does_it() -> None:
    """No kernel is needed for plain pages; packed ones are TPU's."""
    (got,), (want,) = (latent_write(**GOOD, backend=backend) for backend in ("gpu", "reference"))
    np.testing.assert_array_equal(got, want)
    packed = (jnp.zeros((NUM_PAGES, 2, 2, 128), jnp.bfloat16),)
    with pytest.raises(NotImplementedError, match=r"latent_write: GPU kernels write latent pages .*, got packed ones"):
        latent_write(**{**GOOD, "pages": packed}, backend="gpu")

"""latent_write of encoded entries, what is refused, and what XLA does on a GPU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_entries import IndexFp8
from pallas_kernels.latent_write import latent_write
from tests.pallas_kernels.cases import random_values

NUM_PAGES = 6


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
    packed = (jnp.zeros((NUM_PAGES, 2, 1, 2, 128), jnp.bfloat16),)
    with pytest.raises(NotImplementedError, match=r"latent_write: GPU kernels write latent pages .*, got packed ones"):
        latent_write(**{**GOOD, "pages": packed}, backend="gpu")

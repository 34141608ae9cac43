"""Ops over pages in slabs give what they give over arrays of their own, and leave everybody else's words alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Case, Results
from pallas_kernels.cases.find import case_types
from pallas_kernels.cases.in_slabs import apart, bits, in_slabs

# Without pages; and with two caches whose pages are counted apart.
OTHERS = ("merge_states", "sparse_mla_attention")
TYPES = {name: case_type for name, case_type in case_types().items() if name not in OTHERS}
CASES = [
    pytest.param(op, backend, seed, marks=[pytest.mark.sweep] * (seed > 0 or backend == "xla"))
    for op in sorted(TYPES)
    for backend in ("reference", "xla")
    for seed in range(20)
]


def assert_equal_bits(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def check_case(case: Case, backend: str, rng: np.random.Generator, call: Any = None) -> None:
    """A case in slabs beside the same in arrays of its own."""
    call = call or jax.jit(lambda arguments: case.call(backend, *arguments))
    arguments = case.hard_arguments(rng)
    if not arguments.pages:
        pytest.skip("the case has no pages")
    given = Arguments(tuple(jnp.array(array) for array in arguments.pages), arguments.rest)
    num_pages = given.pages[0].shape[0]
    placed = in_slabs(
        given, rng, packs=case.platform == "tpu", blocks_per_slab=int(rng.integers(1, 4)), rest=int(rng.integers(3))
    )
    expected: Results = call(given)
    found: Results = call(placed)
    assert_equal_bits(found.outs, expected.outs)
    assert_equal_bits(apart(found, num_pages).pages, expected.pages)


@pytest.mark.parametrize(("op", "backend", "seed"), CASES)
def test_an_op_gives_the_same_in_slabs(op: str, backend: str, seed: int) -> None:
    """On CPU, by the reference and by vectorised XLA: bit for bit."""
    rng = np.random.default_rng([seed, *op.encode()])
    check_case(TYPES[op].random(rng, backend), backend, rng)

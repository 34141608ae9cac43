"""TPU kernels over pages in slabs give what they give over arrays of their own, which is what the oracle says."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Case, Results
from pallas_kernels.cases.find import case_types
from pallas_kernels.cases.in_slabs import apart, bits, in_slabs
from pallas_kernels.interpret import compile_for
from pallas_kernels.slab_pages import places_of

TYPES = {name: case_type for name, case_type in case_types().items() if "tpu" in case_type.backends}
SEEDS = [pytest.param(seed, marks=[pytest.mark.sweep] * (seed > 0)) for seed in range(10)]


def in_tpu_slabs(arguments: Arguments, rng: np.random.Generator, blocks_per_slab: int) -> Arguments:
    """Slabs of a multiple of eight rows, which pages fill or not; each of two caches has some of its own."""
    if len(arguments.pages) > 1:
        each = [in_tpu_slabs(Arguments((array,), None), rng, blocks_per_slab) for array in arguments.pages]
        return Arguments(tuple(column[0] for column, _ in each), arguments.rest)
    arrays = [(tuple(array.shape[1:]), array.dtype.name) for array in arguments.pages]
    filled = blocks_per_slab * places_of(arrays, blocks_per_slab, packs=True)[0].page_rows
    rest = -filled % 8 + 8 * int(rng.integers(2))
    return in_slabs(arguments, rng, packs=True, blocks_per_slab=blocks_per_slab, rest=rest)


def run(case: Case, arguments: Arguments) -> Results:
    """The kernel's, races watched."""
    return Results(*compile_for("tpu", partial(case.call, "tpu"), *arguments)(*arguments))


def assert_equal_bits(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", sorted(TYPES))
def test_an_op_gives_the_same_in_slabs(op: str, seed: int) -> None:
    """Outputs and pages bit for bit, and as the oracle says; words of others are random bits before, and stay."""
    rng = np.random.default_rng([seed, *op.encode()])
    case = TYPES[op].random(rng, "tpu")
    arguments = case.hard_arguments(rng)
    given = Arguments(tuple(jnp.array(array) for array in arguments.pages), arguments.rest)
    expected = run(case, given)
    case.assert_right(expected, arguments)
    found = run(case, in_tpu_slabs(given, rng, int(rng.integers(1, 4))))
    found = apart(found, given.pages[0].shape[0])
    assert_equal_bits(jax.tree.leaves(found.outs), jax.tree.leaves(expected.outs))
    assert_equal_bits(found.pages, expected.pages)

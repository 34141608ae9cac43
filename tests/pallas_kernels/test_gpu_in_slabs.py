"""Kernels for GPUs over pages in slabs: what they give over arrays of their own, bit for bit; these meet the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Case
from pallas_kernels.cases.find import case_types
from pallas_kernels.cases.in_slabs import apart, in_slabs
from pallas_kernels.interpret import compile_for
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.pallas_kernels.cases import Shape, make_case
from tests.pallas_kernels.test_in_slabs import assert_equal_bits

KERNELS = (
    ("ragged_paged_attention", "gpu"),
    ("ragged_paged_attention", "triton"),
    ("mla_paged_attention", "gpu"),
    ("mla_paged_attention", "triton"),
    ("sparse_mla_attention", "gpu"),
    ("indexer_topk", "triton"),
    ("compressor_update", "triton"),
    ("gated_delta_rule", "gpu"),
    ("causal_conv1d", "gpu"),
    ("selective_scan", "gpu"),
    ("selective_scan", "triton"),
)
IN_SWEEPS = {("mla_paged_attention", "triton"), ("selective_scan", "triton")}  # which see slabs as the "gpu" ones do
CASES = [
    pytest.param(op, backend, seed, marks=[pytest.mark.sweep] * (seed > 0 or (op, backend) in IN_SWEEPS))
    for op, backend in KERNELS
    for seed in range(12)
]


def pages_in_slabs(arguments: Arguments, rng: np.random.Generator, slots: int) -> Arguments:
    """Slabs whose rest is no page, but as many rows as some eights of a page's slots take."""
    rows = in_slabs(arguments, rng, packs=False).pages[0].place.page_rows
    rest = int(rng.integers(3)) * 8 * rows // slots
    return in_slabs(arguments, rng, packs=False, blocks_per_slab=int(rng.integers(1, 4)), rest=rest)


def states_in_slabs(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    """Behind another array of the same pages, as recurrences' states are behind convolutions'; any rest."""
    (states,), rest = arguments
    both = Arguments((jnp.ones((states.shape[0], 7)), states), rest)
    sizes = {"blocks_per_slab": int(rng.integers(1, 3)), "rest": int(rng.integers(4))}
    column = in_slabs(both, rng, packs=False, **sizes).pages
    return Arguments(replace(column, places=column.places[1:]), rest)


def caches_in_slabs(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    """Each in a column of its own."""

    def placed(pages: Any) -> Any:
        sizes = {"blocks_per_slab": int(rng.integers(1, 4)), "rest": int(rng.integers(4))}
        return in_slabs(Arguments((pages,), ()), rng, packs=False, **sizes).pages[0]

    return Arguments(tuple(map(placed, arguments.pages)), arguments.rest)


def check_case(case: Case, backend: str, rng: np.random.Generator) -> None:
    arguments = case.hard_arguments(rng)
    given = Arguments(tuple(jnp.array(array) for array in arguments.pages), arguments.rest)

    def run(arguments: Arguments, watch_races: bool = False) -> Any:
        def call(arguments: Arguments) -> Any:
            return case.call(backend, *arguments)

        return compile_for(backend, call, arguments, watch_races=watch_races)(arguments)

    slots = getattr(case, "page", None)
    if case.op == "sparse_mla_attention":
        placed = caches_in_slabs(given, rng)
    else:
        placed = pages_in_slabs(given, rng, slots) if slots else states_in_slabs(given, rng)
    try:
        found = run(placed)
    except NotImplementedError as refused:
        pytest.skip(str(refused))
    expected = run(given, watch_races=True)
    case.assert_right(expected, arguments)
    assert_equal_bits(found.outs, expected.outs)
    num_pages, column = given.pages[0].shape[0], placed.pages
    assert_equal_bits(apart(found, num_pages).pages, expected.pages)
    for i, array in enumerate(expected.pages):
        column = column.after(column[i].at[jnp.arange(num_pages)].set(jnp.asarray(array)))
    for array in found.pages:  # the words of others stay
        assert_equal_bits(array.memory, column.memory)


@pytest.mark.parametrize(("op", "backend", "seed"), CASES)
def test_a_kernel_gives_the_same_in_slabs(op: str, backend: str, seed: int) -> None:
    rng = np.random.default_rng([seed, *op.encode()])
    check_case(replace(case_types()[op].random(rng, backend), platform="cpu"), backend, rng)


def test_slabs_whose_pages_begin_within_eights_of_tokens_are_left_to_triton() -> None:
    """K of 48 rows before V of 32: of a slab of one page, V does not begin with whole eights of its tokens."""
    shape = Shape(num_kv_heads=4, head_dim=192, head_dim_v=128, page_size=16, q_dtype="bfloat16", kv_dtype="bfloat16")
    q, pages, *step = make_case(0, shape, [(1, 5), (3, 9)]).arrays
    column = in_slabs(Arguments(pages, ()), np.random.default_rng(0), packs=False).pages
    message = r"begin after a multiple of 8 x \(4, 192\) numbers, got slabs of 80 rows .* every 80 rows from row 0 on"
    with pytest.raises(NotImplementedError, match=message):
        ragged_paged_attention(q, column, *step, sm_scale=0.1, backend="gpu")
    found, expected = (ragged_paged_attention(q, x, *step, sm_scale=0.1, backend="triton").out for x in (column, pages))
    assert_equal_bits(found, expected)

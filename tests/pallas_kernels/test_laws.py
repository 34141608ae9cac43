"""Laws of every op that has cases, on each of its backends: a new op is here by its folder alone."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.cases.case import Case, Results, argument_shapes, parse, settings_of, splits
from pallas_kernels.cases.find import case_types
from pallas_kernels.interpret import compile_for

TYPES = case_types()
PAIRS = [(op, backend) for op, case_type in TYPES.items() for backend in case_type.backends]
WRITING = [op for op, case_type in TYPES.items() if case_type().writes]
every_op = pytest.mark.parametrize("case_type", TYPES.values(), ids=TYPES)
ATTENTION = ("mla_paged_attention", "ragged_paged_attention", "sparse_mla_attention")
# Kernels that take long to compile: tests of them over pages in slabs compare one case of each with the oracle too.
LARGE = {
    "tpu": (*ATTENTION, "gated_delta_rule", "ring_delta_rule", "ring_scan", "selective_scan"),
    "gpu": ATTENTION,
    "triton": ATTENTION[1:2],
}
RANDOM_CASES = [
    pytest.param(op, backend, seed, marks=[pytest.mark.sweep] * (seed > 0 or op in LARGE.get(backend, ())))
    for op, backend in PAIRS
    for seed in range(24)
]
STEPS = 2


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(("op", "backend", "seed"), RANDOM_CASES)
def test_agrees_with_the_oracle(op: str, backend: str, seed: int) -> None:
    """Random cases with arguments that are hard; kernels are interpreted with races watched."""
    agrees_with_the_oracle(TYPES[op], backend, seed)


def agrees_with_the_oracle(case_type: type[Case], backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = case_type.random(rng, backend)
    steps = [case.hard_arguments(rng) for _ in range(STEPS)]
    run = compile_for(backend, partial(case.call, backend), *steps[0])
    for step in steps:
        case.assert_right(Results(*run(*step)), step)


@every_op
def test_needs_no_jit(case_type: type[Case]) -> None:
    """The reference outside of `jit`, whose checks see the values of arguments."""
    rng = np.random.default_rng(1)
    case = case_type.random(rng, "reference")
    arguments = case.hard_arguments(rng)
    found = jax.tree.map(np.asarray, case.call("reference", *arguments))
    case.assert_right(Results(*found), arguments)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("op", WRITING)
def test_donated_pages_are_written_in_place(op: str, platform: str) -> None:
    """The reference's module aliases every page array, copies none, and needs less memory than a quarter of one.

    Of a page with a ring that is the largest.
    """
    has_ring = op.startswith("ring_")
    if has_ring and jax.__version_info__ < (0, 11):
        pytest.skip("XLA of jax 0.10 copies arrays that a loop reads first")
    case = parse(TYPES[op], [], platform=platform, dtype="float32", q_dtype="float32")
    pages, rest = argument_shapes(case)
    pages = tuple(jax.ShapeDtypeStruct((4 * array.shape[0], *array.shape[1:]), array.dtype) for array in pages)
    compiled = jax.jit(partial(case.call, "reference"), donate_argnums=0).lower(pages, rest).compile()
    text = compiled.as_text()
    for i, array in enumerate(pages):
        assert f": ({i}, {{}}, may-alias)" in text.splitlines()[0]
        assert not re.findall(rf"= \S+\[{array.shape[0]},\S* (?:copy|convert|transpose)\(", text)
    sizes = [array.size * array.dtype.itemsize for array in pages]
    assert compiled.memory_analysis().temp_size_in_bytes < (max(sizes) if has_ring else min(sizes)) // 4


@every_op
def test_a_case_is_what_its_settings_say(case_type: type[Case]) -> None:
    """Each field can be set by name=value, and no other."""
    for seed in range(5):
        case = case_type.random(np.random.default_rng(seed), "reference")
        assert parse(case_type, settings_of(dataclasses.asdict(case))) == case
    with pytest.raises(ValueError, match=r"expected a setting out of .*'platform'.*, got 'nothing'"):
        parse(case_type, ["nothing=1"])
    with pytest.raises(ValueError, match=r"expected a model out of .*, got 'nobody'"):
        parse(case_type, ["model=nobody"])


@every_op
def test_every_model_has_cases(case_type: type[Case]) -> None:
    """A whole layer of every model, and a shard of it where it splits, is a case that can be compiled."""
    names = [shape.name for shape in case_type.shapes]
    assert len(set(names)) == len(names)
    for shape in case_type.shapes:
        for num_shards in (1, 2, 4, 8):
            assert splits(case_type, shape, num_shards) or num_shards > 1
            for label, sizes in case_type.to_compile(shape, num_shards) if num_shards == 1 else ():
                assert shape.name in label
                assert parse(case_type, [f"model={shape.name}", *settings_of(sizes)]) == case_type(**sizes)

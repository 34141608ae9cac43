"""Ops with recurrent states: one token alone in its step is right, whatever the step calls its sequence."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from pallas_kernels.cases.case import Results
from pallas_kernels.cases.find import case_types
from pallas_kernels.cases.states import StateCase, as_arguments
from pallas_kernels.interpret import compile_for

TYPES = {op: case_type for op, case_type in case_types().items() if issubclass(case_type, StateCase)}
PAIRS = [(op, backend) for op, case_type in TYPES.items() for backend in case_type.backends]
CASES = [
    pytest.param(*pair, seed, marks=[pytest.mark.sweep] * (seed > 0 and pair[0] != "selective_scan"))
    for pair in PAIRS
    for seed in (0, 1)  # Mamba 1, then Mamba 2
]
NAMES = {"decode": (1, 1, 1), "prefill": (0, 1, 1), "mixed": (0, 0, 1)}


@pytest.mark.parametrize(("op", "backend", "seed"), CASES)
def test_one_token_of_any_name(op: str, backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = dataclasses.replace(TYPES[op].random(rng, backend), tokens=1)
    arrays, step = case.step(rng, [1])
    run = compile_for(backend, partial(case.call, backend), *as_arguments(arrays, step))
    for ends in NAMES.values():
        arguments = as_arguments(arrays, step._replace(distribution=np.array(ends, np.int32)))
        case.assert_right(Results(*run(*arguments)), arguments)

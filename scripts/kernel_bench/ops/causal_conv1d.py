"""causal_conv1d: steps of decoding, of drafts, and a prefill from nothing, at shapes of Mamba and gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.gated_delta_rule.shapes import SHAPES as DELTA_SHAPES
from pallas_kernels.gated_delta_rule.shapes import DeltaShape
from pallas_kernels.ssm_update import causal_conv1d
from pallas_kernels.ssm_update.shapes import SHAPES, SsmShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.recurrent import StateStep, case_of, cases_of

OP = "causal_conv1d"


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so."""
    return cases_of((*SHAPES, *DELTA_SHAPES), sizes, case)


def case(kind: str, shape: SsmShape | DeltaShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    return case_of(
        OP,
        kind,
        shape,
        sizes,
        work=work,
        arguments=arguments,
        call=call,
        case=case,
        same=shape.state_shapes(sizes.shards)[0],
    )


def work(step: StateStep, shape: SsmShape | DeltaShape, sizes: Sizes) -> Work:
    """Inputs, weights and bias read, outputs written; each state written, and one read by each sequence that has it. A
    multiplication and an addition for each tap of an output, its activation apart."""
    channels, before = shape.state_shapes(sizes.shards)[0]
    taps = before + 1
    numbers = 2 * step.num_tokens * channels + channels * (taps + 1) + step.num_moved * channels * (taps - 1)
    return Work(numbers * itemsize(sizes.q_dtype), 2 * step.num_tokens * channels * taps)


def arguments(step: StateStep, shape: SsmShape | DeltaShape, sizes: Sizes, seed: int) -> Arguments:
    """pages: the states; rest: x, weight, bias, step."""
    rng = np.random.default_rng(seed)
    state = shape.state_shapes(sizes.shards)[0]
    channels, before = state
    states = random_array(rng, (1 + step.num_written, *state), sizes.q_dtype).at[0].set(0)
    shapes = ((step.num_tokens, channels), (channels, before + 1), (channels,))
    return Arguments((states,), (*(random_array(rng, shape, sizes.q_dtype) for shape in shapes), step.arrays(rng)))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Outputs and states."""
    x, weight, bias, step = rest
    result = causal_conv1d(x, pages[0], weight, *step, bias=bias, backend=backend)
    return result.out, (result.states,)

"""causal_conv1d: steps of decoding, of drafts, and a prefill from nothing, at shapes of Mamba and gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels.gated_delta_rule.shapes import SHAPES as DELTA_SHAPES
from pallas_kernels.gated_delta_rule.shapes import DeltaShape
from pallas_kernels.ssm_update import causal_conv1d
from pallas_kernels.ssm_update.shapes import SHAPES, SsmShape
from scripts.kernel_bench.case import Arguments, BenchCase, Sizes, Work, itemsize, random_array
from scripts.kernel_bench.recurrent import KINDS, StateStep
from scripts.kernel_bench.shards import splits, with_most_shards
from scripts.kernel_bench.step import words

OP = "causal_conv1d"


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so."""
    for shape in (*SHAPES, *DELTA_SHAPES):
        for kind in KINDS if splits(shape, sizes.shards) else ():
            yield case(kind, shape, sizes)


def case(kind: str, shape: SsmShape | DeltaShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    step = StateStep.of(kind, sizes)
    state = shape.state_shapes(sizes.shards)[0]
    return BenchCase(
        OP,
        kind,
        shape.name,
        words(step.rows),
        sizes,
        work(step, state, sizes),
        lambda seed: arguments(step, state, sizes, seed),
        call,
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        writes=True,
        has_tokens_in_pages=False,
        same=state,
    )


def work(step: StateStep, state: tuple[int, ...], sizes: Sizes) -> Work:
    """Inputs, weights and bias read, outputs written; each state written, and one read by each sequence that has it. A
    multiplication and an addition for each tap of an output, its activation apart."""
    channels, taps = state[0], state[1] + 1
    numbers = 2 * step.num_tokens * channels + channels * (taps + 1) + step.num_moved * channels * (taps - 1)
    return Work(numbers * itemsize(sizes.q_dtype), 2 * step.num_tokens * channels * taps)


def arguments(step: StateStep, state: tuple[int, ...], sizes: Sizes, seed: int) -> Arguments:
    """pages: the states; rest: x, weight, bias, step."""
    rng = np.random.default_rng(seed)
    channels, before = state
    states = random_array(rng, (1 + step.num_written, *state), sizes.q_dtype).at[0].set(0)
    shapes = ((step.num_tokens, channels), (channels, before + 1), (channels,))
    return Arguments((states,), (*(random_array(rng, shape, sizes.q_dtype) for shape in shapes), step.arrays(rng)))


def call(backend: str, pages: Any, rest: Any) -> tuple[Any, Any]:
    """Outputs and states."""
    x, weight, bias, step = rest
    result = causal_conv1d(x, pages[0], weight, *step, bias=bias, backend=backend)
    return result.out, (result.states,)

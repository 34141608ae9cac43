"""Ops with recurrent states: a checkpoint inside a step is the state that a step ending there would leave."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.cases.compare import assert_close_as
from pallas_kernels.cases.states import Arrays, StateCase, Step, as_arguments
from pallas_kernels.gated_delta_rule.cases import DeltaCase
from pallas_kernels.gated_delta_rule.oracle import INPUTS
from pallas_kernels.ssm_update.cases import ConvCase, ScanCase

NUM_TOKENS = 37
NUMBERS = {"tokens": NUM_TOKENS, "num_pages": 40, "checkpoints": 3, "q_dtype": "float32"}
CASES: dict[str, StateCase] = {
    "convolution": ConvCase(seqs=5, channels=6, state_dtype="float32", **NUMBERS),
    "mamba1": ScanCase(seqs=5, heads=6, head_dim=0, state_dim=4, **NUMBERS),
    "mamba2": ScanCase(seqs=5, heads=6, head_dim=3, state_dim=4, groups=2, **NUMBERS),
    "delta": DeltaCase(seqs=5, key_heads=2, heads=4, key_dim=4, value_dim=3, **NUMBERS),
    "kda": DeltaCase(seqs=5, key_heads=2, heads=2, key_dim=4, value_dim=3, per_channel=1, **NUMBERS),
}
PAIRS = [(name, backend) for name in CASES for backend in ("reference", "xla") if backend in CASES[name].backends]
EACH = pytest.mark.parametrize(("name", "backend"), PAIRS)
LENGTHS = ([1, 1, 0, 20, 15], [3, 0, 16, 4, 14], [37], [9, 26, 2], [])


@cache
def jitted(case: StateCase, backend: str) -> Any:
    return jax.jit(partial(case.call, backend))


def run(case: StateCase, backend: str, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, states)"""
    found = jitted(case, backend)(*as_arguments(arrays, step))
    return np.asarray(found.outs), np.asarray(found.pages[0])


@pytest.mark.parametrize("kept", [1, 3])
@EACH
def test_checkpoints_are_left_on_the_way(name: str, backend: str, kept: int) -> None:
    """Several in some sequences, at any lengths, beside decode rows and states kept for drafts; over pages of NaN."""
    case = dataclasses.replace(CASES[name], kept=kept)
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = case.step(np.random.default_rng(seed), q_lens)
        case.assert_step(run(case, backend, arrays, step), arrays, step)


@EACH
def test_every_length_equals_two_steps(name: str, backend: str) -> None:
    """Outputs and states are those of a step that ends at the checkpoint and one that goes on from there."""
    case = dataclasses.replace(CASES[name], seqs=1, checkpoints=1, num_pages=4)
    arrays = case.inputs(np.random.default_rng(1))
    of_tokens = INPUTS if isinstance(case, DeltaCase) else ("x", "dt", "b", "c")
    empty = np.full((4, *case.state_shape), np.nan, np.float32)
    empty[0] = 0

    def step_from(first: int, count: int, pages: tuple[int, int], states: np.ndarray, end: int) -> Any:
        given = {key: np.roll(x, -first, axis=0) if key in of_tokens else x for key, x in arrays.items()}
        ints = (np.array(x, np.int32) for x in ([0, count], [0, 0, 1], [pages[0]], [[pages[1]]]))
        step = Step(*ints, np.array([pages[0] > 0])).with_checkpoints([[end]], [[1]])
        return run(case, backend, given | {"states": states}, step)

    for end in range(1, NUM_TOKENS):
        out, after = step_from(0, NUM_TOKENS, (0, 2), empty, end)
        first, halfway = step_from(0, end, (0, 1), empty, 0)
        second, expected = step_from(end, NUM_TOKENS - end, (1, 2), halfway, 0)
        assert_close_as("float32", after[1:3], expected[1:3].astype(np.float64))
        assert_close_as("float32", out, np.concatenate([first[:end], second[: NUM_TOKENS - end]]).astype(np.float64))


@EACH
def test_the_state_of_a_neighbouring_token_is_noticed(name: str, backend: str) -> None:
    """A checkpoint a token early or late is far from the right state."""
    case = CASES[name]
    arrays, step = dataclasses.replace(case, checkpoints=0).step(np.random.default_rng(5), [1, 30, 6])
    right = step.with_checkpoint_of(1, [23], case.num_pages)
    case.assert_step(run(case, backend, arrays, right), arrays, right)
    for end in (22, 24):
        wrong = run(case, backend, arrays, step.with_checkpoint_of(1, [end], case.num_pages))
        with pytest.raises(AssertionError):
            case.assert_step(wrong, arrays, right)


@EACH
def test_columns_without_a_checkpoint_change_nothing(name: str, backend: str) -> None:
    """A length without a page, and a page without a length, name none."""
    case = dataclasses.replace(CASES[name], checkpoints=0)
    arrays, step = case.step(np.random.default_rng(5), [1, 30, 6])
    none = step.with_checkpoints([[0, 2]] * case.seqs, [[3, 0]] * case.seqs)
    for found, expected in zip(*(run(case, backend, arrays, x) for x in (none, step)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_kernel_without_checkpoints_says_so() -> None:
    """Mamba 2's in Triton; on a GPU that has no other, such a call goes by XLA."""
    case = CASES["mamba2"]
    arguments = as_arguments(*case.step(np.random.default_rng(5), [1, 30, 6]))
    with pytest.raises(NotImplementedError, match="selective_scan: this kernel leaves no states at checkpoints inside"):
        case.call("triton", *arguments)

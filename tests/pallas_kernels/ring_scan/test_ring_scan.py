"""ring_scan against numpy's attention in float64, and as selective_scan over the same tokens."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Results, argument_shapes, parse
from pallas_kernels.cases.compare import assert_close
from pallas_kernels.cases.in_slabs import in_slabs
from pallas_kernels.cases.rings import Arrays, RingStep
from pallas_kernels.ring_scan import xla_scan
from pallas_kernels.ring_scan.api import ring_page_shapes
from pallas_kernels.ring_scan.cases import RingScanCase
from pallas_kernels.ring_scan.oracle import OF_TOKENS
from pallas_kernels.ssm_update import selective_scan

SIZES = {"tokens": 24, "seqs": 6, "slots": 6, "most_new": 4, "num_pages": 30}
SMALL = RingScanCase(**SIZES, q_dtype="float32", heads=4, head_dim=3, state_dim=4, groups=2)  # type: ignore[arg-type]
CASES = {
    "rows": SMALL,
    "natural": dataclasses.replace(SMALL, in_rows=0),
    "rounded": dataclasses.replace(SMALL, q_dtype="bfloat16", state_dtype="bfloat16"),
    "one_slot": dataclasses.replace(SMALL, slots=1, most_new=1, groups=1, least_dt=0.1, most_dt=2.0),
}
LENGTHS: tuple[list[int], ...] = ([1, 1, 1, 1, 1, 0], [1, 0, 2, 4, 3], [1, 5, 4, 9], [24], [])
BACKENDS = pytest.mark.parametrize("backend", ["reference", "xla"])
NULL, OWN, OTHER = 0, 1, 2  # pages


@cache
def jitted(case: RingScanCase, backend: str) -> Any:
    return jax.jit(partial(case.call, backend))


def run(case: RingScanCase, backend: str, arguments: Arguments) -> Results:
    return Results(*jax.tree.map(np.asarray, tuple(jitted(case, backend)(*arguments))))


@BACKENDS
@pytest.mark.parametrize("name", CASES)
def test_random_steps(name: str, backend: str) -> None:
    """Decode rows, drafts, rows of too many tokens, pages that several read; NaN wherever nobody may look."""
    case = CASES[name]
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = case.step(np.random.default_rng(seed), q_lens)
        case.assert_step(run(case, backend, case.as_arguments(arrays, step)), arrays, step)


def test_trips() -> None:
    """The vectorised path takes two sequences at a time, and the last trip has one."""
    room = 2 * 4 * 4 * 3 * 4
    small = partial(xla_scan.ring_scan, trip_bytes=room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_scan, "_TRIP_BYTES", room)
        assert xla_scan.num_trips((30, 4, 3, 4), 5, 3) == {"outputs": 3, "states": 2}
        patch.setattr(xla_scan, "ring_scan", small)
        for seed in range(3):
            arrays, step = SMALL.step(np.random.default_rng(seed), [1, 1, 2, 3, 4])
            SMALL.assert_step(SMALL.call("xla", *SMALL.as_arguments(arrays, step)), arrays, step)


class Sequence:
    """One sequence over a ring, whose tokens come in steps; `case` has one row."""

    def __init__(self, case: RingScanCase, backend: str, inputs: Arrays) -> None:
        self.case, self.backend, self.inputs = dataclasses.replace(case, seqs=1, num_pages=3), backend, inputs
        shapes = self.case.page_shapes.items()
        self.pages = {name: np.full((3, *shape), np.nan, jnp.dtype(dtype)) for name, (shape, dtype) in shapes}
        for array in self.pages.values():
            array[NULL] = 0
        self.page, self.held = NULL, 0

    def outputs(self, tokens: list[int], page: int = OWN, held: int | None = None) -> np.ndarray:
        """[n, H, P] of these of the inputs' tokens as the next ones, kept in `page`; `held` are in the ring."""
        held = self.held if held is None else held
        count, writes = len(tokens), page != self.page or held + len(tokens) > self.case.slots
        arrays = dict(self.inputs)
        for name in OF_TOKENS:
            arrays[name] = np.full_like(self.inputs[name], np.nan)
            arrays[name][:count] = self.inputs[name][tokens]
        starts, ends, *of_row = (np.array(x, np.int32) for x in ([0, count], [0, 0, 1], [self.page], [page], [held]))
        step = RingStep(starts, ends, of_row[0], of_row[1], of_row[2], np.array([writes]))
        found = run(self.case, self.backend, self.case.as_arguments(arrays | self.pages, step))
        self.pages = dict(zip(self.pages, found.pages, strict=True))
        self.page, self.held = page, 0 if writes else held
        return found.outs[:count]


def whole(case: RingScanCase, inputs: Arrays) -> np.ndarray:
    """Outputs of all tokens as one sequence, by selective_scan."""
    states = jnp.zeros((2, case.heads, case.head_dim, case.state_dim))
    x, dt, a, b, c = (jnp.asarray(inputs[name]) for name in ("x", "dt", "a", "b", "c"))
    numbers = ([0, case.tokens], [0, 0, 1], [0], [1], [0])
    starts, ends, read, write, has_initial = (jnp.array(values, jnp.int32) for values in numbers)
    weights: dict[str, Any] = {name: jnp.asarray(inputs[name]) for name in ("d", "dt_bias")}
    weights |= {"dt_limit": case.limit, "backend": "reference"}
    step = (starts, ends, read, write, has_initial > 0)
    return np.asarray(selective_scan(x, states, dt, a, b, c, *step, **weights).out)


@BACKENDS
@pytest.mark.parametrize("name", ["rows", "natural", "one_slot"])
def test_decoding_gives_what_the_plain_op_gives(name: str, backend: str) -> None:
    """Token by token, over rings that run over, and from page to page."""
    case = CASES[name]
    inputs = case.inputs(np.random.default_rng(1))
    sequence, found = Sequence(case, backend, inputs), []
    for t in range(case.tokens):
        found.append(sequence.outputs([t], OTHER if t in (5, 6, 17) else OWN))
        sequence.held += 1
    assert_close(np.concatenate(found), whole(case, inputs))


@BACKENDS
def test_rejected_drafts_are_in_no_state(backend: str) -> None:
    """Drafts beside right tokens change no output after them, whatever number of tokens is right."""
    rng = np.random.default_rng(2)
    inputs = SMALL.inputs(rng)
    expected, sequence, done = whole(SMALL, inputs), Sequence(SMALL, backend, inputs), 0
    while done < SMALL.tokens:
        count = min(int(rng.integers(1, SMALL.most_new + 1)), SMALL.tokens - done)
        drafts = rng.integers(0, SMALL.tokens, SMALL.most_new - count).tolist()
        found = sequence.outputs([*range(done, done + count), *drafts])
        assert_close(found[:count], expected[done : done + count])
        sequence.held, done = sequence.held + count, done + count


@BACKENDS
def test_a_neighbouring_token_of_the_ring_is_noticed(backend: str) -> None:
    """Going on a token early gives other outputs and another state."""
    inputs = SMALL.inputs(np.random.default_rng(3))
    expected = whole(SMALL, inputs)[4]
    for held in (4, 3, 1):
        sequence = Sequence(SMALL, backend, inputs)
        sequence.outputs([0, 1, 2, 3])
        difference = np.abs(sequence.outputs([4], held=held)[0] - expected).max()
        assert difference < 1e-5 if held == 4 else difference > 1e-2


@BACKENDS
def test_what_is_not_finite_stays_in_its_sequence(backend: str) -> None:
    """No bit of other sequences changes where one has inputs that are not finite."""
    arrays, step = SMALL.step(np.random.default_rng(6), [1, 1, 2, 4, 3])
    clean = run(SMALL, backend, SMALL.as_arguments(arrays, step))
    own, dirty = step.tokens(3), {name: array.copy() for name, array in arrays.items()}
    for name, value in {"x": np.nan, "b": np.inf, "c": -np.inf, "dt": np.nan}.items():
        dirty[name][own] = value
    found = run(SMALL, backend, SMALL.as_arguments(dirty, step))
    assert np.isnan(found.outs[own]).all()
    others = np.delete(np.arange(SMALL.tokens), own)
    np.testing.assert_array_equal(found.outs[others], clean.outs[others])
    pages = np.delete(np.arange(SMALL.num_pages), step.state_write[3])
    for after, before in zip(found.pages, clean.pages, strict=True):
        np.testing.assert_array_equal(after[pages], before[pages])


@BACKENDS
def test_long_decays_are_exact(backend: str) -> None:
    """What fades to nothing beside what hardly does: sums in the thousands leave later tokens their digits."""
    case = dataclasses.replace(SMALL, slots=24)
    inputs = case.inputs(np.random.default_rng(4))
    inputs["dt"][::2], inputs["dt"][1::2] = 90.0, -3.0
    sequence, found = Sequence(case, backend, inputs), []
    for t in range(case.tokens):
        found.append(sequence.outputs([t]))
        sequence.held += 1
    assert_close(np.concatenate(found), whole(case, inputs))


@BACKENDS
def test_without_skip_and_bias(backend: str) -> None:
    """d and dt_bias of None are those of zero."""
    arrays, step = SMALL.step(np.random.default_rng(5), [1, 2, 4])
    arrays |= {name: np.zeros_like(arrays[name]) for name in ("d", "dt_bias")}
    pages, (inputs, numbers) = SMALL.as_arguments(arrays, step)
    with_zeros = SMALL.call(backend, pages, (inputs, numbers))
    without = SMALL.call(backend, pages, (inputs | {"d": None, "dt_bias": None}, numbers))
    jax.tree.map(np.testing.assert_array_equal, tuple(without), tuple(with_zeros))


def test_auto_takes_the_vectorised_path_on_cpu() -> None:
    arguments = SMALL.as_arguments(*SMALL.step(np.random.default_rng(5), [1, 2, 1]))
    by_auto, by_xla = (run(SMALL, backend, arguments) for backend in ("auto", "xla"))
    jax.tree.map(np.testing.assert_array_equal, tuple(by_auto), tuple(by_xla))


@BACKENDS
def test_arrays_of_one_column_stay_in_one_memory(backend: str) -> None:
    """All that a call writes is in the memory of each result, and a step that donates it copies no memory."""
    rng = np.random.default_rng(7)
    arrays, step = SMALL.step(rng, [1, 2, 4])
    given = SMALL.as_arguments(arrays, step)
    placed = in_slabs(given, rng, packs=False, rest=1)
    expected = SMALL.call(backend, *given)
    found = SMALL.call(backend, *placed)
    last: Any = found.pages[-1]
    for array, right in zip(found.pages, expected.pages, strict=True):
        here = dataclasses.replace(array, memory=last.memory)[jnp.arange(SMALL.num_pages)]  # type: ignore[type-var]
        np.testing.assert_array_equal(here, right)

    def memory_after(column: Any, rest: Any) -> Any:
        return SMALL.call(backend, column, rest).pages[-1].memory  # type: ignore[attr-defined]

    text = str(jax.jit(memory_after, donate_argnums=0).lower(*placed).compile().as_text())
    slabs, rows, _ = placed.pages.memory.shape  # type: ignore[attr-defined]
    assert "may-alias" in text.splitlines()[0]
    assert not re.findall(rf"= u32\[{slabs},{rows},128\]\S* copy\(", text)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 copies arrays that a loop reads first")
@BACKENDS
def test_pages_are_written_in_place(backend: str) -> None:
    """A step that donates states and rings copies none of them."""
    pages, rest = argument_shapes(RingScanCase(q_dtype="float32"))
    call = jax.jit(partial(RingScanCase().call, backend), donate_argnums=0)
    text = str(call.lower(pages, rest).compile().as_text())
    for i, array in enumerate(pages):
        assert f": ({i}, {{}}, may-alias)" in text.splitlines()[0]
        assert not re.findall(rf"= \S+\[{array.shape[0]},\S* (?:copy|convert|transpose)\(", text)


@pytest.mark.parametrize("slots", [8, 16, 32])
@pytest.mark.parametrize("model", ["mamba2-2.7b", "nemotron-h-8b", "granite-4.0-h-small"])
def test_a_decoding_step_moves_six_tenths_of_the_states(model: str, slots: int) -> None:
    """Bytes of states and rings, one state written in as many steps as there are slots: of those of selective_scan."""
    case = parse(RingScanCase, [f"model={model}", "tokens=64", f"slots={slots}"])
    assert isinstance(case, RingScanCase)
    (shape, _), *_ = case.page_shapes.values()
    plain = 2 * case.seqs * 4 * np.prod(shape)
    assert 0.5 < case.moved_bytes / plain < 0.58
    rounded = dataclasses.replace(case, state_dtype="bfloat16")
    assert 0.5 < 2 * rounded.moved_bytes / plain < 0.6


def test_slots_of_rows_are_whole_words() -> None:
    """Numbers of a token fill rows of 128 words; the rest is padding."""
    assert ring_page_shapes(8, 80, 64, 1, 128, "bfloat16") == (
        ((8, 40, 128), "bfloat16"),
        ((8, 1, 128), "float32"),
        ((8, 2, 128), "bfloat16"),
    )
    assert ring_page_shapes(4, 10, 64, 1, 128, "bfloat16")[0] == ((4, 6, 128), "bfloat16")
    assert ring_page_shapes(4, 130, 64, 2, 128, "float32")[1:] == (((4, 2, 128), "float32"), ((4, 2, 128), "float32"))

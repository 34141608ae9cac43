"""ring_delta_rule against numpy's recurrence in float64, and as gated_delta_rule over the same tokens."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Results, argument_shapes
from pallas_kernels.cases.compare import assert_close
from pallas_kernels.cases.in_slabs import in_slabs
from pallas_kernels.cases.rings import RingStep
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.ring_delta_rule import xla_rule
from pallas_kernels.ring_delta_rule.cases import RingDeltaCase
from pallas_kernels.ring_delta_rule.oracle import INPUTS

SMALL = RingDeltaCase(
    tokens=20,
    seqs=6,
    slots=6,
    most_new=4,
    num_pages=30,
    q_dtype="float32",
    key_heads=2,
    heads=4,
    key_dim=4,
    value_dim=3,
    per_channel=0,
    scale=0.7,
)
CHANNEL = dataclasses.replace(SMALL, per_channel=1)
CASES = {
    "scalar": SMALL,
    "channel": CHANNEL,
    "rounded": dataclasses.replace(SMALL, q_dtype="bfloat16", state_dtype="bfloat16", delta_dtype="bfloat16"),
    "one_slot": dataclasses.replace(CHANNEL, slots=1, most_new=1, l2norm=0, decay_dtype="bfloat16"),
}
LENGTHS = ([1, 1, 1, 0, 1, 1], [1, 0, 4, 3, 2], [5, 1, 7, 4], [20], [])
KINDS = pytest.mark.parametrize("case", [SMALL, CHANNEL], ids=["scalar", "channel"])
BACKENDS = pytest.mark.parametrize("backend", ["reference", "xla"])


@cache
def jitted(case: RingDeltaCase, backend: str) -> Any:
    return jax.jit(partial(case.call, backend))


def run(case: RingDeltaCase, backend: str, arguments: Arguments) -> Results:
    return Results(*jax.tree.map(np.asarray, tuple(jitted(case, backend)(*arguments))))


@BACKENDS
@pytest.mark.parametrize("name", CASES)
def test_random_steps(name: str, backend: str) -> None:
    """Decode, drafts, sequences of too many tokens, prefixes that several read, no sequence at all."""
    case = CASES[name]
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = case.step(np.random.default_rng(seed), q_lens)
        case.assert_step(run(case, backend, case.as_arguments(arrays, step)), arrays, step)


def test_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectorised path takes two sequences at a time, and the last trip fewer."""
    trip_bytes = 2 * 4 * 4 * 4 * 3
    monkeypatch.setattr(xla_rule, "_CPU_TRIP_BYTES", trip_bytes)
    monkeypatch.setattr(xla_rule, "ring_delta_rule", partial(xla_rule.ring_delta_rule, trip_bytes=trip_bytes))
    assert xla_rule.num_trips((30, 4, 4, 3), 5, 3) == {"outputs": 3, "states": 2}
    for seed in range(3):
        arrays, step = SMALL.step(np.random.default_rng(seed), [1, 2, 3, 4, 1])
        arguments = SMALL.as_arguments(arrays, step)
        SMALL.assert_step(SMALL.call("xla", *arguments), arrays, step)


@dataclasses.dataclass
class Decoding:
    """One sequence that decodes in rings, beside gated_delta_rule over all its tokens."""

    case: RingDeltaCase
    backend: str
    arrays: dict[str, np.ndarray]  # inputs of all tokens
    page: int = 1
    held: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        shapes = self.case.page_shapes.values()
        self.pages = tuple(np.full((4, *shape), np.nan, jnp.dtype(dtype)) for shape, dtype in shapes)
        for page in self.pages:
            page[0] = 0

    def step(self, tokens: np.ndarray, write: int | None = None) -> np.ndarray:
        """Outputs of these of all tokens as the new ones; goes on in page `write`, where given."""
        count, fresh = len(tokens), self.done == 0
        new = {name: np.full((self.case.tokens, *x.shape[1:]), np.nan, x.dtype) for name, x in self.arrays.items()}
        for name, array in self.arrays.items():
            new[name][:count] = array[tokens]
        writes = fresh or write is not None or self.held + count > self.case.slots
        read, self.page = 0 if fresh else self.page, self.page if write is None else write
        ends = [int(count == 1)] * 2 + [1]
        numbers = (np.array(x, np.int32) for x in ([0, count], ends, [read], [self.page], [self.held]))
        step = RingStep(*numbers, np.array([writes]))
        pages = dict(zip(self.case.page_shapes, self.pages, strict=True))
        found = run(self.case, self.backend, self.case.as_arguments(new | pages, step))
        self.pages, self.held = found.pages, 0 if writes else self.held
        return found.outs[:count]

    def accept(self, count: int) -> None:
        """So many of the new tokens stay."""
        self.held, self.done = self.held + count, self.done + count


def plain_outputs(case: RingDeltaCase, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Of all tokens as one sequence, by gated_delta_rule."""
    count = len(arrays["q"])
    states = jnp.zeros((2, *case.page_shapes["states"][0]), jnp.float32)
    step = (jnp.array(x, jnp.int32) for x in ([0, count], [0, 0, 1], [0], [1]))
    options: dict[str, Any] = {"scale": case.scale, "use_qk_l2norm": bool(case.l2norm), "backend": "reference"}
    result = gated_delta_rule(*(arrays[name] for name in INPUTS), states, *step, jnp.array([False]), **options)
    return np.asarray(result.out)


@BACKENDS
@KINDS
def test_decoding_equals_the_plain_op(case: RingDeltaCase, backend: str) -> None:
    """Token by token, over rings that run over, and at times in another page."""
    single = dataclasses.replace(case, seqs=1)
    arrays = case.inputs(np.random.default_rng(1))
    decoding = Decoding(single, backend, arrays)
    outs = []
    for t in range(case.tokens):
        outs.append(decoding.step(np.array([t]), write=2 + t % 2 if t in (4, 15) else None))
        decoding.accept(1)
    assert_close(np.concatenate(outs), plain_outputs(case, arrays))


@BACKENDS
@KINDS
def test_rejected_drafts_are_in_no_state(case: RingDeltaCase, backend: str) -> None:
    """Steps of a token and drafts, of which any number is right: outputs are those of the tokens that stayed."""
    rng = np.random.default_rng(2)
    arrays = case.inputs(rng)
    expected = plain_outputs(case, arrays)
    decoding = Decoding(dataclasses.replace(case, seqs=1), backend, arrays)
    while decoding.done < case.tokens:
        accepted = int(min(rng.integers(1, case.most_new + 1), case.tokens - decoding.done))
        right = np.arange(decoding.done, decoding.done + accepted)
        wrong = rng.integers(0, case.tokens, int(rng.integers(0, case.most_new + 1 - accepted)))
        out = decoding.step(np.concatenate([right, wrong]))
        assert_close(out[:accepted], expected[right])
        decoding.accept(accepted)


@BACKENDS
@KINDS
def test_a_token_more_or_less_is_seen(case: RingDeltaCase, backend: str) -> None:
    """The planted fault: a step that goes on from the neighbouring token of the ring gives other outputs."""
    arrays = case.inputs(np.random.default_rng(3))
    expected = plain_outputs(case, arrays)[5]
    for held, is_right in ((5, True), (4, False), (0, False)):
        decoding = Decoding(dataclasses.replace(case, seqs=1), backend, arrays)
        decoding.step(np.arange(4))
        decoding.accept(4)
        decoding.step(np.array([4]))
        decoding.accept(1)
        decoding.held = held
        difference = np.abs(decoding.step(np.array([5]), write=3)[0] - expected).max()
        assert (difference < 1e-5) == is_right, difference
        assert is_right or difference > 1e-3


@BACKENDS
@KINDS
def test_what_is_not_finite_stays_in_its_sequence(case: RingDeltaCase, backend: str) -> None:
    """A sequence whose inputs are not finite changes no bit of the others."""
    arrays, step = case.step(np.random.default_rng(6), [1, 3, 4, 2, 1])
    clean = run(case, backend, case.as_arguments(arrays, step))
    row = 2
    tokens = step.tokens(row)
    dirty = {name: array.copy() for name, array in arrays.items()}
    dirty["v"][tokens.start], dirty["g"][tokens.stop - 1], dirty["k"][tokens.stop - 1] = np.nan, np.inf, np.inf
    found = run(case, backend, case.as_arguments(dirty, step))
    others = np.setdiff1d(np.arange(case.tokens), np.arange(case.tokens)[tokens])
    np.testing.assert_array_equal(found.outs[others], clean.outs[others])
    pages = np.setdiff1d(np.arange(case.num_pages), step.state_write[row])
    for after, before in zip(found.pages, clean.pages, strict=True):
        np.testing.assert_array_equal(after[pages], before[pages])
    assert np.isnan(found.outs[tokens]).any()


@BACKENDS
@KINDS
def test_a_decay_to_nothing(case: RingDeltaCase, backend: str) -> None:
    """g of minus infinity forgets everything before, in the ring, too."""
    arrays = case.inputs(np.random.default_rng(4))
    arrays["g"][[0, 3, 7, 8]] = -np.inf
    decoding = Decoding(dataclasses.replace(case, seqs=1), backend, arrays)
    outs = []
    for t in range(12):
        outs.append(decoding.step(np.array([t])))
        decoding.accept(1)
    assert_close(np.concatenate(outs), plain_outputs(case, arrays)[:12])


def test_auto_takes_the_vectorised_path_on_cpu() -> None:
    arrays, step = SMALL.step(np.random.default_rng(5), [1, 2, 1])
    arguments = SMALL.as_arguments(arrays, step)
    by_auto, by_xla = (run(SMALL, backend, arguments) for backend in ("auto", "xla"))
    np.testing.assert_array_equal(by_auto.outs, by_xla.outs)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 copies arrays that a loop reads first")
@BACKENDS
@KINDS
def test_arrays_of_one_column_stay_in_one_memory(case: RingDeltaCase, backend: str) -> None:
    """All that a call writes is in the memory of each result, and a step that donates it copies no memory."""
    rng = np.random.default_rng(7)
    given = case.as_arguments(*case.step(rng, [1, 2, 4]))
    placed = in_slabs(given, rng, packs=False, rest=1)
    expected = case.call(backend, *given)
    found = case.call(backend, *placed)
    memory: Any = found.pages[-1].memory
    for array, right in zip(found.pages, expected.pages, strict=True):
        here = dataclasses.replace(array, memory=memory)[jnp.arange(case.num_pages)]  # type: ignore[type-var]
        np.testing.assert_array_equal(here, right)

    def memory_after(column: Any, rest: Any) -> Any:
        return case.call(backend, column, rest).pages[-1].memory  # type: ignore[attr-defined]

    text = str(jax.jit(memory_after, donate_argnums=0).lower(*placed).compile().as_text())
    slabs, rows, _ = placed.pages.memory.shape  # type: ignore[attr-defined]
    assert "may-alias" in text.splitlines()[0]
    assert not re.findall(rf"= u32\[{slabs},{rows},128\]\S* copy\(", text)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 copies arrays that a loop reads first")
@BACKENDS
@KINDS
def test_pages_are_written_in_place(case: RingDeltaCase, backend: str) -> None:
    """A step that donates states and rings copies none of them."""
    pages, rest = argument_shapes(dataclasses.replace(case, num_pages=4096))
    text = str(jax.jit(partial(case.call, backend), donate_argnums=0).lower(pages, rest).compile().as_text())
    for i, array in enumerate(pages):
        assert f": ({i}, {{}}, may-alias)" in text.splitlines()[0]
        assert not re.findall(rf"= \S+\[{array.shape[0]},\S* (?:copy|convert|transpose)\(", text)

"""Steps of ops over ring states: as a server has them, and random ones with NaN wherever nobody may look."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import case
from pallas_kernels.cases.case import Arguments, Case, OfSequences, Results, Sizes, itemsize
from pallas_kernels.cases.compare import assert_close_as, assert_same
from pallas_kernels.cases.numbers import one_of, random_array, random_values
from pallas_kernels.cases.pages import POOL_BYTES

Arrays = dict[str, Any]  # inputs, "states" and the arrays of the ring, by name
_NUM_DRAFTS = 3


class RingStep(NamedTuple):
    """What describes the sequences of one call, as numpy, in the op's order."""

    query_start_loc: np.ndarray  # int32[S + 1]
    distribution: np.ndarray  # int32[3]
    state_read: np.ndarray  # int32[S]
    state_write: np.ndarray  # int32[S]
    num_held: np.ndarray  # int32[S]
    writes_state: np.ndarray  # bool[S]

    def tokens(self, row: int) -> slice:
        """New tokens of a row."""
        return slice(self.query_start_loc[row], self.query_start_loc[row + 1])

    def num_new(self, row: int, most: int) -> int:
        """New tokens of a row that have outputs: none where they are more than `most`."""
        tokens = self.tokens(row)
        count = int(tokens.stop - tokens.start)
        return count if count <= most else 0

    def first_slot(self, row: int) -> int:
        """Slot of the first new token of a row."""
        return 0 if self.writes_state[row] else int(self.num_held[row])

    def state_page(self, row: int) -> int:
        """Page for the state after the held tokens of a row, 0: none."""
        return int(self.state_write[row]) if self.writes_state[row] else 0

    def ring_page(self, row: int, most: int) -> int:
        """Page for the entries of a row's new tokens, 0: none."""
        return int(self.state_write[row]) if self.num_new(row, most) else 0

    def does(self, row: int, most: int) -> bool:
        """Whether a row reads its page at all."""
        return bool(self.num_new(row, most) or self.writes_state[row])

    @property
    def num_rows(self) -> int:
        """Sequences, padding apart."""
        return int(self.distribution[2])


def random_ring_step(
    rng: np.random.Generator, q_lens: Sequence[int], num_rows: int, num_pages: int, num_slots: int, most: int
) -> RingStep:
    """Rows of `q_lens` new tokens and padding.

    Some start from nothing, some go on in their page, some write their state there or into another page, or nowhere;
    one page may be read by several that write others. Rows that do nothing name any page and number of held tokens.
    """
    lengths = np.array([*q_lens, *[0] * (num_rows - len(q_lens))])
    pages = rng.permutation(np.arange(1, num_pages)).tolist()
    shared = pages.pop()
    step = RingStep(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.array([int(np.cumprod([q <= 1 for q in q_lens]).sum())] * 2 + [len(q_lens)], np.int32),
        rng.integers(0, num_pages, num_rows).astype(np.int32),
        rng.integers(0, num_pages, num_rows).astype(np.int32),
        rng.integers(0, num_slots + 1, num_rows).astype(np.int32),
        rng.random(num_rows) < 0.5,
    )
    for row, q_len in enumerate(lengths[: len(q_lens)]):
        if not step.does(row, most):
            continue
        own = pages.pop()
        read = one_of(rng, [0, shared, own, own, own])
        held = int(rng.integers(0, num_slots + 1)) if read else 0
        goes_on = read == own and q_len <= most and held + q_len <= num_slots
        if not goes_on:
            step.writes_state[row] = True
        step.state_read[row], step.num_held[row] = read, held
        is_elsewhere = step.writes_state[row] and read == own and rng.random() < 0.3
        step.state_write[row] = pages.pop() if is_elsewhere else own
        if step.writes_state[row] and rng.random() < 0.1:
            step.state_write[row] = 0
    return step


@dataclass(frozen=True)
class RingCase(OfSequences, Case, ABC):
    """A step of equal sequences, each at another place of its ring.

    Subclasses name their inputs, those of every token first, and the arrays of their pages.
    """

    tokens: int = 64  # new ones of all sequences
    seqs: int = 64
    slots: int = 16  # of a ring
    most_new: int = 1  # tokens of a sequence that have outputs
    num_pages: int = 0  # 0: a pool
    q_dtype: str = "bfloat16"  # of the inputs
    state_dtype: str = "float32"

    kinds = ("decode", "drafts")
    of_tokens: ClassVar[tuple[str, ...]]  # names of the inputs of every token
    ring_arrays: ClassVar[tuple[str, ...]]  # names of the arrays of a ring
    copied: ClassVar[tuple[str, ...]]  # those that hold inputs as they are

    @classmethod
    def of_kind(cls, kind: str, step: case.Step) -> Sizes:
        """`batch` sequences that decode one token or verify drafts, too."""
        seqs = 3 if step.small else step.batch or 64
        new = 1 if kind == "decode" else 1 + _NUM_DRAFTS
        sizes = {"tokens": seqs * new, "seqs": seqs, "most_new": new}
        return sizes | ({"num_pages": 1 + seqs} if step.small else {})

    @property
    def page_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of a page of "states" and of each array of the ring."""
        raise NotImplementedError

    @property
    def pool_pages(self) -> int:
        """Pages of states and rings; a pool's rings are beyond what a chip keeps beside its memory, too."""
        return max(self.num_pages or 1 + POOL_BYTES // self._bytes_of(self.ring_arrays[0]), 1 + self.seqs)

    @property
    def moved_bytes(self) -> int:
        """Bytes of states and rings that a step of `step_arrays` reads and writes."""
        step, slot = self._numpy_step(np.random.default_rng(0)), self.slot_bytes
        states = self.seqs + int(step.writes_state.sum())
        return states * self._bytes_of("states") + (int(step.num_held.sum()) + self.tokens) * slot

    @property
    def slot_bytes(self) -> int:
        """Bytes of an entry."""
        return sum(self._bytes_of(name) for name in self.ring_arrays) // self.slots

    def _bytes_of(self, name: str) -> int:
        shape, dtype = self.page_shapes[name]
        return int(np.prod(shape)) * itemsize(dtype)

    def _numpy_step(self, rng: np.random.Generator) -> RingStep:
        """Each sequence in its own page, with another number of held tokens."""
        new = self.tokens // self.seqs
        held = np.arange(self.seqs) % self.slots + 1
        pages = 1 + rng.permutation(self.seqs)
        decode = self.seqs if new == 1 else 0
        ends = np.array([decode, decode, self.seqs])
        return RingStep(np.arange(self.seqs + 1) * new, ends, pages, pages, held, held + new > self.slots)

    def step_arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """A step in the op's order; so many sequences write their state as have to."""
        return on_device(self._numpy_step(rng))

    def random_pages(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """States and rings on the device; the null page is zero."""
        shapes = self.page_shapes.values()
        return tuple(random_array(rng, (self.pool_pages, *shape), dtype).at[0].set(0) for shape, dtype in shapes)

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """Numpy arrays of all inputs but pages."""
        raise NotImplementedError

    def hard_ring(self, rng: np.random.Generator) -> Arrays:
        """Numpy arrays of all rings, as inputs leave them."""
        raise NotImplementedError

    def oracle(self, arrays: Arrays, step: RingStep) -> tuple[np.ndarray, Arrays]:
        """(outputs float64, pages by name with what the step writes)."""
        raise NotImplementedError

    def step(self, rng: np.random.Generator, q_lens: Sequence[int]) -> tuple[Arrays, RingStep]:
        """A random step; NaN in the padding of inputs, in pages that nobody reads, and in slots behind the held."""
        step = random_ring_step(rng, q_lens, self.seqs, self.num_pages, self.slots, self.most_new)
        arrays = self.inputs(rng)
        for name in self.of_tokens:
            arrays[name][step.query_start_loc[-1] :] = np.nan
        shape, dtype = self.page_shapes["states"]
        pages = {"states": random_values(rng, (self.num_pages, *shape), dtype)} | self.hard_ring(rng)
        num_held = self._held_by_page(step)
        for page in range(1, self.num_pages):
            for name in self.ring_arrays:
                pages[name][page, num_held.get(page, 0) :] = np.nan
            if page not in num_held:
                pages["states"][page] = np.nan
        for array in pages.values():
            array[0] = 0
        return arrays | pages, step

    def _held_by_page(self, step: RingStep) -> dict[int, int]:
        """Slots that are read of each page that is."""
        held: dict[int, int] = {}
        for row in range(step.num_rows):
            if step.does(row, self.most_new):
                page = int(step.state_read[row])
                held[page] = max(held.get(page, 0), int(step.num_held[row]))
        return held

    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """A random step; at times all sequences are called mixed, whatever they are."""
        left, counts = self.tokens, list[int]()
        for _ in range(int(rng.integers(0, self.seqs + 1))):
            counts.append(min(left, one_of(rng, [0, 1, 1, 1, self.most_new, int(rng.integers(0, self.most_new + 3))])))
            left -= counts[-1]
        arrays, step = self.step(rng, sorted(counts, key=lambda n: n > 1))
        if rng.random() < 0.25:
            step = step._replace(distribution=np.array([0, 0, step.num_rows], np.int32))
        return self.as_arguments(arrays, step)

    def as_arguments(self, arrays: Arrays, step: RingStep) -> Arguments:
        """The same as jax arrays."""
        pages = tuple(jnp.asarray(arrays[name]) for name in self.page_shapes)
        others = {name: jnp.asarray(array) for name, array in arrays.items() if name not in self.page_shapes}
        return Arguments(pages, (others, on_device(step)))

    def as_numpy(self, arguments: Arguments) -> tuple[Arrays, RingStep]:
        """What `as_arguments` was given."""
        inputs, step = arguments.rest
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        pages = {name: np.asarray(page) for name, page in zip(self.page_shapes, arguments.pages, strict=True)}
        return arrays | pages, RingStep(*map(np.asarray, step))

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        out, pages = self.oracle(*self.as_numpy(arguments))
        return Results(out, tuple(pages[name] for name in self.page_shapes))

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """As `assert_step`."""
        self.assert_step(found, *self.as_numpy(arguments))

    def assert_step(self, found: Results, arrays: Arrays, step: RingStep) -> None:
        """Outputs, states and entries are right: padding is 0, and what nobody writes keeps every bit."""
        out, expected = np.asarray(found.outs), self.oracle(arrays, step)
        assert_close_as(self.q_dtype, out, expected[0])
        has_output = np.zeros(self.tokens, bool)
        for row in range(step.num_rows):
            has_output[step.tokens(row)] = step.num_new(row, self.most_new) > 0
        assert (out[~has_output] == 0).all(), "an output of padding is not 0"
        assert str(out.dtype) == self.q_dtype
        states, entries, free = self._places(step)
        for name, page in zip(self.page_shapes, found.pages, strict=True):
            after, before, right = np.asarray(page), arrays[name], expected[1][name]
            written = states if name == "states" else entries
            others = ~(written if name == "states" else free)[: len(after)]
            assert_same(after[others], before[others])
            if name in self.copied:
                assert_same(after[written], right[written].astype(after.dtype))
            else:
                assert_close_as(str(before.dtype), after[written], right[written])

    def _places(self, step: RingStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """bool[pages] states that are written; bool[pages, R] entries that are, and slots that may hold anything."""
        states = np.zeros(self.num_pages, bool)
        entries, free = np.zeros((2, self.num_pages, self.slots), bool)
        for row in range(step.num_rows):
            states[step.state_page(row)] = True
            page, first = step.ring_page(row, self.most_new), step.first_slot(row)
            entries[page, first : first + step.num_new(row, self.most_new)] = True
            free[page, first:] = True
            free[step.state_page(row)] = True
        states[0], entries[0], free[0] = False, False, False
        return states, entries, free


def on_device(step: RingStep) -> tuple[jax.Array, ...]:
    """The step as jax arrays."""
    return tuple(jnp.asarray(x) if x.dtype == bool else jnp.asarray(x, jnp.int32) for x in step)

"""Steps of ops with recurrent states: as a server has them, and random ones with NaN wherever nobody may look."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.cases import case
from pallas_kernels.cases.case import Arguments, Case, OfSequences, Results, Sizes
from pallas_kernels.cases.compare import assert_close_as, assert_same
from pallas_kernels.cases.numbers import one_of, random_values
from pallas_kernels.cases.pages import POOL_BYTES

Arrays = dict[str, Any]  # inputs of an op by name, and "states"
_NUM_DRAFTS = 3


class Step(NamedTuple):
    """What describes the sequences of one call, as numpy, in the op's order."""

    query_start_loc: np.ndarray  # int32[S + 1]
    distribution: np.ndarray  # int32[3]
    state_read: np.ndarray  # int32[S]
    state_write: np.ndarray  # int32[S, L]
    has_initial_state: np.ndarray  # bool[S]
    checkpoint_ends: np.ndarray | None = None  # int32[S, k]
    checkpoint_pages: np.ndarray | None = None  # int32[S, k]

    def tokens(self, row: int) -> slice:
        """New tokens of a row."""
        return slice(self.query_start_loc[row], self.query_start_loc[row + 1])

    def writes(self, row: int) -> dict[int, int]:
        """Page of the state after each token of a row, by its place among them; only those that have one."""
        tokens = self.tokens(row)
        q_len, columns = tokens.stop - tokens.start, self.state_write[row].tolist()
        places = [*range(q_len - len(columns), q_len)]
        if self.checkpoint_ends is not None and self.checkpoint_pages is not None:
            places += (self.checkpoint_ends[row] - 1).tolist()
            columns += self.checkpoint_pages[row].tolist()
        return {place: page for place, page in zip(places, columns, strict=True) if place >= 0 and page > 0}

    def with_checkpoints(self, ends: npt.ArrayLike, pages: npt.ArrayLike) -> Step:
        """The same with [S, k] checkpoints."""
        return self._replace(checkpoint_ends=np.array(ends, np.int32), checkpoint_pages=np.array(pages, np.int32))

    def with_checkpoint_of(self, row: int, ends: Sequence[int], num_pages: int) -> Step:
        """The same with checkpoints of one row alone, in pages that nobody names."""
        free = np.setdiff1d(np.arange(1, num_pages), [*self.state_write.ravel(), *self.state_read])
        all_ends, pages = np.zeros((2, len(self.state_read), len(ends)), np.int32)
        all_ends[row], pages[row] = ends, free[: len(ends)]
        return self.with_checkpoints(all_ends, pages)

    @property
    def num_rows(self) -> int:
        """Sequences, padding apart."""
        return int(self.distribution[2])

    @property
    def written(self) -> list[int]:
        """All pages that are written, in order."""
        return sorted(page for row in range(self.num_rows) for page in self.writes(row).values())


def random_step(
    rng: np.random.Generator,
    q_lens: Sequence[int],
    num_rows: int,
    num_pages: int,
    num_kept: int = 1,
    num_checkpoints: int = 0,
) -> Step:
    """Rows of `q_lens` new tokens and padding, each with a page for the state after up to `num_kept` last tokens.

    A third of the rows start from a page that they write; another page may be the initial state of several rows. Rows
    without an initial state name any page to read, as do columns of tokens that a row does not have.
    """
    lengths = [*q_lens, *[0] * (num_rows - len(q_lens))]
    pages = rng.permutation(np.arange(1, num_pages)).tolist()
    read, write = np.zeros(num_rows, np.int32), np.zeros((num_rows, num_kept), np.int32)
    for row, q_len in enumerate(lengths):
        write[row, : max(num_kept - q_len, 0)] = rng.integers(0, num_pages, max(num_kept - q_len, 0))
        kept = min(q_len, int(rng.integers(1, num_kept + 1)))
        if kept:
            own, pages = pages[:kept], pages[kept:]
            write[row, -kept:] = own
            read[row] = rng.choice(own)
    has_initial = (rng.random(num_rows) < 0.7) & (np.array(lengths) > 0)
    elsewhere = rng.random(num_rows) < 0.67
    read[elsewhere] = rng.choice(pages, int(elsewhere.sum()))
    read[~has_initial] = rng.integers(0, num_pages, int((~has_initial).sum()))
    decode = int(np.cumprod([q <= 1 for q in q_lens]).sum())
    starts, ends = np.concatenate([[0], np.cumsum(lengths)]), np.array([decode, decode, len(q_lens)])
    step = Step(starts.astype(np.int32), ends.astype(np.int32), read, write, has_initial)
    if not num_checkpoints:
        return step
    unread = np.setdiff1d(pages, read[has_initial])
    return step.with_checkpoints(*_random_checkpoints(rng, step, num_checkpoints, unread.tolist()))


def _random_checkpoints(
    rng: np.random.Generator, step: Step, count: int, pages: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(ends, pages) int32[S, count]: some of every row's tokens that have no page, at times only every fourth token.

    Columns without a checkpoint have a length without a page, or a page without a length.
    """
    shape = (len(step.state_read), count)
    ends, own = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in range(step.num_rows):
        q_len, taken = step.tokens(row).stop - step.tokens(row).start, step.writes(row)
        free = [end for end in range(1, q_len) if end - 1 not in taken]
        if rng.random() < 0.5:
            free = [end for end in free if end % 4 == 0] or free
        num = min(len(free), len(pages), int(rng.integers(0, count + 1)))
        columns = np.sort(rng.permutation(count)[:num])
        ends[row, columns], own[row, columns] = np.sort(rng.permutation(free)[:num]), pages[:num]
        pages = pages[num:]
    is_none = own == 0
    only_length = is_none & (rng.random(shape) < 0.5)
    ends[only_length] = rng.integers(1, 100)
    own[is_none & ~only_length] = rng.integers(1, 100)
    return ends, own


def random_states(
    rng: np.random.Generator, step: Step, shape: tuple[int, ...], num_pages: int, dtype: str
) -> np.ndarray:
    """Random states in the pages that a row starts from, NaN in all others; page 0 is zero."""
    states = random_values(rng, (num_pages, *shape), dtype)
    starts = step.has_initial_state & (np.diff(step.query_start_loc) > 0)
    starts[step.num_rows :] = False
    states[np.setdiff1d(np.arange(num_pages), step.state_read[starts])] = np.nan
    states[0] = 0
    return states


def on_device(step: Step) -> tuple[jax.Array, ...]:
    """The step as jax arrays, without checkpoints where it has none."""
    return tuple(jnp.asarray(x) for x in step if x is not None)


def hard_counts(rng: np.random.Generator, num_tokens: int, num_rows: int, near: Sequence[int]) -> list[int]:
    """New tokens of each sequence: those of one token first, then lengths around `near` and random ones."""
    counts: list[int] = []
    left = num_tokens
    for _ in range(int(rng.integers(0, num_rows + 1))):
        edges = [n + d for n in near for d in (-1, 0, 1)]
        n = one_of(rng, [0, 1, 1, 1, 2, int(rng.integers(0, left + 1)), one_of(rng, edges), left])
        counts.append(max(0, min(left, n)))
        left -= counts[-1]
    return sorted(counts, key=lambda n: n > 1)


@dataclass(frozen=True)
class StateCase(OfSequences, Case, ABC):
    """A step of equal sequences that go on from their states, or of fresh prompts.

    Subclasses name their inputs: those of every token, in which padding holds NaN, and their states' shape.
    """

    tokens: int = 1024  # new ones of all sequences
    seqs: int = 64
    kept: int = 1  # states of a sequence: one, and those of drafts
    checkpoints: int = 0  # states of a sequence on its way
    has_states: int = 1  # from the steps before
    num_pages: int = 0  # 0: a pool
    q_dtype: str = "bfloat16"  # of the inputs
    state_dtype: str = "float32"

    kinds = ("decode", "drafts", "prefill")
    copies_states: ClassVar[bool] = False  # they are inputs, whose bits stay

    @classmethod
    def of_kind(cls, kind: str, step: case.Step) -> Sizes:
        """`batch` sequences that decode one token or verify drafts, too, or a prefill of `context` tokens."""
        if kind == "prefill":
            tokens = 20 if step.small else step.context or 8192
            sizes = {"tokens": tokens, "seqs": 1, "kept": 1, "has_states": 0}
        else:
            kept, seqs = 1 if kind == "decode" else 1 + _NUM_DRAFTS, 3 if step.small else step.batch or 64
            sizes = {"tokens": seqs * kept, "seqs": seqs, "kept": kept, "has_states": 1}
        return sizes | ({"num_pages": 1 + sizes["seqs"] * sizes["kept"]} if step.small else {})

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one page."""
        raise NotImplementedError

    @property
    def num_moved(self) -> int:
        """States that are read or written, a state that is both twice."""
        return self.seqs * (self.kept + self.checkpoints + self.has_states)

    @property
    def pool_pages(self) -> int:
        """Pages of states."""
        page_bytes = case.itemsize(self.state_dtype) * int(np.prod(self.state_shape))
        written = self.seqs * (self.kept + self.checkpoints)
        return max(self.num_pages or 1 + POOL_BYTES // page_bytes, 1 + written)

    def step_arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """A step in the op's order, each state in its own page; checkpoints, if any, at even distances."""
        starts = np.arange(self.seqs + 1) * (self.tokens // self.seqs)
        num_decode = self.seqs if self.tokens == self.seqs and self.has_states else 0
        pages = 1 + rng.permutation(self.seqs * (self.kept + self.checkpoints)).reshape(self.seqs, -1)
        write, own = pages[:, : self.kept], pages[:, self.kept :]
        has_initial = np.full(self.seqs, bool(self.has_states))
        step = Step(starts, np.array([num_decode, num_decode, self.seqs]), write[:, -1], write, has_initial)
        if self.checkpoints:
            distance = self.tokens // self.seqs / (self.checkpoints + 1)
            ends = (np.arange(1, self.checkpoints + 1) * distance).astype(int)
            step = step.with_checkpoints(np.tile(ends, (self.seqs, 1)), own)
        return tuple(x if x.dtype == bool else x.astype(jnp.int32) for x in on_device(step))

    def inputs(self, rng: np.random.Generator) -> Arrays:
        """Numpy arrays of all inputs but states."""
        raise NotImplementedError

    def oracle(self, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """(outputs float64, states)."""
        raise NotImplementedError

    def make(self, rng: np.random.Generator, q_lens: Sequence[int], of_tokens: Sequence[str]) -> tuple[Arrays, Step]:
        """A random step; NaN in the padding of inputs `of_tokens`, and in pages that nobody starts from."""
        step = random_step(rng, q_lens, self.seqs, self.num_pages, self.kept, self.checkpoints)
        arrays = self.inputs(rng)
        for name in of_tokens:
            arrays[name][step.query_start_loc[-1] :] = np.nan
        states = random_states(rng, step, self.state_shape, self.num_pages, self.state_dtype)
        return arrays | {"states": states}, step

    def assert_step(self, found: tuple[Any, Any], arrays: Arrays, step: Step) -> None:
        """(out, states) is right: padding is 0, pages that nobody writes keep every bit."""
        out, after = (np.asarray(x) for x in found)
        expected, expected_after = self.oracle(arrays, step)
        assert_close_as(self.q_dtype, out, expected)
        assert (out[step.query_start_loc[-1] :] == 0).all(), "an output of padding is not 0"
        written = step.written
        others = np.setdiff1d(np.arange(len(after)), written)
        assert_same(after[others], arrays["states"][others])
        if self.copies_states:
            exact = after[written].astype(np.float64) == expected_after[written]
            assert exact.all(), "a state holds other inputs"
        assert_close_as(self.state_dtype, after[written], expected_after[written])
        assert (str(out.dtype), str(after.dtype)) == (self.q_dtype, self.state_dtype)

    def expected(self, arguments: Arguments) -> Results:
        """By the oracle."""
        arrays, step = as_numpy(arguments)
        out, states = self.oracle(arrays, step)
        return Results(out, (states,))

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """As `assert_step`."""
        self.assert_step((found.outs, *found.pages), *as_numpy(arguments))


def as_numpy(arguments: Arguments) -> tuple[Arrays, Step]:
    """The arrays of Arguments((states,), (inputs by name, step)) in numpy, and the step."""
    inputs, step = arguments.rest
    arrays = {name: None if array is None else np.asarray(array) for name, array in inputs.items()}
    return arrays | {"states": np.asarray(arguments.pages[0])}, Step(*map(np.asarray, step))


def hard_arguments(rng: np.random.Generator, arrays: Arrays, step: Step) -> Arguments:
    """The same as jax arrays; at times all sequences are called mixed, whatever they are."""
    if rng.random() < 0.25:
        step = step._replace(distribution=np.array([0, 0, step.num_rows], np.int32))
    return as_arguments(arrays, step)


def as_arguments(arrays: Arrays, step: Step) -> Arguments:
    """The same as jax arrays."""
    inputs = {name: None if array is None else jnp.asarray(array) for name, array in arrays.items() if name != "states"}
    return Arguments((jnp.asarray(arrays["states"]),), (inputs, on_device(step)))

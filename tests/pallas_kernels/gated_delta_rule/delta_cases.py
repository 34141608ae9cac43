"""Random steps of gated delta nets, and the recurrence token by token in numpy float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tests.pallas_kernels.cases import assert_close, random_values

Arrays = dict[str, np.ndarray]
INPUTS = ("q", "k", "v", "g", "beta")


class Step(NamedTuple):
    """What describes the sequences of one call, as numpy, in the op's order."""

    query_start_loc: np.ndarray  # int32[S + 1]
    distribution: np.ndarray  # int32[3]
    state_read: np.ndarray  # int32[S]
    state_write: np.ndarray  # int32[S, L]
    has_initial_state: np.ndarray  # bool[S]

    def tokens(self, row: int) -> slice:
        return slice(self.query_start_loc[row], self.query_start_loc[row + 1])

    def writes(self, row: int) -> dict[int, int]:
        """Page of the state after each token of a row, by its place among them; only those that have one."""
        tokens = self.tokens(row)
        q_len, columns = tokens.stop - tokens.start, self.state_write[row].tolist()
        places = range(q_len - len(columns), q_len)
        return {place: page for place, page in zip(places, columns, strict=True) if place >= 0 and page > 0}

    @property
    def num_rows(self) -> int:
        return int(self.distribution[2])


def random_step(rng: np.random.Generator, q_lens: Sequence[int], num_rows: int, num_pages: int, num_kept: int) -> Step:
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
    return Step(starts.astype(np.int32), ends.astype(np.int32), read, write, has_initial)


def oracle(arrays: Arrays, step: Step, scale: float, use_qk_l2norm: bool) -> tuple[np.ndarray, np.ndarray]:
    """(out float64[T, H, V], states): the recurrence, a token, a head and a sequence after the other."""
    q, k, v, g, beta = (arrays[name].astype(np.float64) for name in INPUTS)
    states, heads_per_key = arrays["states"], v.shape[1] // q.shape[1]
    out, after = np.zeros(v.shape), states.astype(np.float64)
    for row in range(step.num_rows):
        tokens, writes = step.tokens(row), step.writes(row)
        for h in range(v.shape[1]):
            state = np.zeros(states.shape[2:])
            if step.has_initial_state[row]:
                state = states[step.state_read[row], h].astype(np.float64)
            for place, t in enumerate(range(tokens.start, tokens.stop)):
                query, key = q[t, h // heads_per_key], k[t, h // heads_per_key]
                if use_qk_l2norm:
                    query, key = (x / np.sqrt(x @ x + 1e-6) for x in (query, key))
                state = np.exp(g[t, h]).reshape(-1, 1) * state
                state = state + np.outer(key, beta[t, h] * (v[t, h] - key @ state))
                out[t, h] = scale * (query @ state)
                if place in writes:
                    after[writes[place], h] = state
    return out, after


@dataclass(frozen=True)
class Shape:
    """Static shape of a call."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 4
    value_dim: int = 3
    is_per_channel: bool = False
    num_tokens: int = 90
    num_kept: int = 1
    dtype: str = "float32"
    state_dtype: str = "float32"
    use_qk_l2norm: bool = True
    scale: float = 0.7
    num_rows: int = 5
    num_pages: int = 24

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.key_dim, self.value_dim)

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Inputs of all tokens. Some decays are so strong that their sums leave what float32's exponential can hold."""
        of_key, of_head = (self.num_tokens, self.key_heads, self.key_dim), (self.num_tokens, self.value_heads)
        decay = -np.exp(2 * rng.standard_normal((*of_head, self.key_dim) if self.is_per_channel else of_head))
        length = 1.0 if self.use_qk_l2norm else self.key_dim**-0.5
        return {
            "q": random_values(rng, of_key, self.dtype),
            "k": random_values(rng, of_key, self.dtype) * random_values(rng, (), self.dtype).dtype.type(length),
            "v": random_values(rng, (*of_head, self.value_dim), self.dtype),
            "g": decay.astype(np.float32),
            "beta": rng.random(of_head).astype(np.float32),
        }

    def make(self, rng: np.random.Generator, q_lens: Sequence[int]) -> tuple[Arrays, Step]:
        """A random step; NaN in padding tokens and in pages that nobody starts from; page 0 is zero."""
        step = random_step(rng, q_lens, self.num_rows, self.num_pages, self.num_kept)
        arrays = self.arrays(rng)
        for name in INPUTS:
            arrays[name][step.query_start_loc[-1] :] = np.nan
        states = random_values(rng, (self.num_pages, *self.state_shape), self.state_dtype)
        starts = step.has_initial_state & (np.diff(step.query_start_loc) > 0)
        starts[step.num_rows :] = False
        states[np.setdiff1d(np.arange(self.num_pages), step.state_read[starts])] = np.nan
        states[0] = 0
        return arrays | {"states": states}, step

    def oracle(self, arrays: Arrays, step: Step) -> tuple[np.ndarray, np.ndarray]:
        return oracle(arrays, step, self.scale, self.use_qk_l2norm)

    def assert_right(self, result: tuple[Any, Any], arrays: Arrays, step: Step) -> None:
        """(out, states) is right: padding is 0, pages that nobody writes keep their bytes."""
        out, after = (np.asarray(x) for x in result)
        expected, expected_after = self.oracle(arrays, step)
        assert_close(out, expected, self.dtype, "out")
        assert (out[step.query_start_loc[-1] :] == 0).all()
        written = sorted(page for row in range(step.num_rows) for page in step.writes(row).values())
        others = np.setdiff1d(np.arange(self.num_pages), written)
        assert after[others].tobytes() == arrays["states"][others].tobytes()
        assert_close(after[written], expected_after[written], self.state_dtype, "states")
        assert (out.dtype, after.dtype) == (arrays["v"].dtype, arrays["states"].dtype)

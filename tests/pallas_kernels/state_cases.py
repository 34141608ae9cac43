"""Random steps of ops with recurrent states, with NaN wherever nobody may look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.cases import random_values


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

    @property
    def written(self) -> list[int]:
        """All pages that are written, in order."""
        return sorted(page for row in range(self.num_rows) for page in self.writes(row).values())


def random_step(
    rng: np.random.Generator, q_lens: Sequence[int], num_rows: int, num_pages: int, num_kept: int = 1
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
    return Step(starts.astype(np.int32), ends.astype(np.int32), read, write, has_initial)


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
    return tuple(jnp.asarray(x) for x in step)

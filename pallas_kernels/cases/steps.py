"""A step of ragged sequences over pages in random order, and how much of them its queries see.

Flow:    (query tokens, context) of each sequence, mask -> [Step] -> block tables, lengths; tokens and pairs seen
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import case
from pallas_kernels.cases.case import Case, Sizes
from pallas_kernels.cases.numbers import one_of
from pallas_kernels.cases.pages import pool_pages
from pallas_kernels.layouts import PageLayout, cdiv
from pallas_kernels.mask import MaskRule

# (query tokens, tokens of the sequence) of each sequence, one-token ones first.
Rows = tuple[tuple[int, int], ...]

SMALL_ROWS: dict[str, Rows] = {
    "decode": ((1, 37), (1, 1), (1, 24)),
    "decode-long": ((1, 150),),
    "decode-32k": ((1, 150), (1, 90)),
    "prefill": ((24, 24),),
    "mixed": ((1, 20), (1, 33), (9, 30)),
}


def rows_of(kind: str, batch: int = 0, context: int = 0, small: bool = False) -> Rows:
    """The sequences of a kind of step; 0: as many, and as long, as the kind says.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in SMALL_ROWS:
        raise ValueError(f"expected a kind out of {sorted(SMALL_ROWS)}, got {kind!r}")
    if small:
        return SMALL_ROWS[kind]
    if kind == "prefill":
        return ((context or 8192, context or 8192),) * (batch or 1)
    if kind == "mixed":
        length, count = context or 4096, batch or 64
        prefills = cdiv(count, 16)
        return ((1, length),) * (count - prefills) + ((min(512, length), length),) * prefills
    default_batch, default_context = {"decode": (64, 4096), "decode-long": (1, 131072), "decode-32k": (64, 32768)}[kind]
    return ((1, context or default_context),) * (batch or default_batch)


def words(rows: Rows) -> str:
    """The sizes of a step, short."""
    counts: dict[tuple[int, int], int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return " + ".join(f"{n}x{q if q > 1 else ''}{'of' if q > 1 else ''}{length}" for (q, length), n in counts.items())


def rows_in(text: str) -> Rows:
    """The rows that `words` tells of."""
    found: Rows = ()
    for part in text.split("+"):
        count, q_len, length = re.fullmatch(r"\s*(\d+)x(?:(\d+)of)?(\d+)\s*", part).groups()  # type: ignore[union-attr]
        found += ((int(q_len or 1), int(length)),) * int(count)
    return found


@dataclass(frozen=True)
class Step:
    """Sequences, who sees what, and the tokens of a page."""

    rows: Rows
    mask: MaskRule
    page: int

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return sum(q for q, _ in self.rows)

    @property
    def num_columns(self) -> int:
        """Columns of the block table, at least one."""
        return max(1, *(cdiv(length, self.page) for _, length in self.rows))

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the tokens that any query of a sequence sees."""
        bounds = zip(self._bounds(), self.rows, strict=True)
        return tuple((int(lower[0]), length) if q_len else (0, 0) for (lower, _), (q_len, length) in bounds)

    @property
    def tokens_seen(self) -> int:
        """Over the sequences: whose K and V must be read."""
        return sum(end - first for first, end in self.runs)

    @property
    def pairs_seen(self) -> int:
        """(query, key) pairs under the mask."""
        return sum(int((positions - lower + 1).sum()) for lower, positions in self._bounds())

    @property
    def num_pages(self) -> int:
        """Pages that hold a token that is seen, and the null page."""
        return 1 + sum(cdiv(end, self.page) - first // self.page for first, end in self.runs)

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """`ints` on the device."""
        return on_device(*self.ints(rng))

    def ints(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """(block_tables, seq_lens, query_start_loc, distribution); pages that nobody sees are the null page."""
        tables = np.zeros((len(self.rows), self.num_columns), np.int32)
        free = 1 + rng.permutation(self.num_pages - 1)
        for row, (first, end) in enumerate(self.runs):
            columns = slice(first // self.page, cdiv(end, self.page))
            count = columns.stop - columns.start
            tables[row, columns], free = free[:count], free[count:]
        starts = np.cumsum([0, *(q for q, _ in self.rows)])
        num_decode = sum(q == 1 for q, _ in self.rows)
        lengths = [length for _, length in self.rows]
        return tables, np.array(lengths), starts, np.array((num_decode, num_decode, len(self.rows)))

    def new_slots(self, tables: np.ndarray) -> jax.Array:
        """int32[num_tokens]: where the query tokens lie, by the block tables of `ints`."""
        slots = []
        for row, (q_len, length) in zip(tables, self.rows, strict=True):
            positions = np.arange(length - q_len, length)
            slots.append(row[positions // self.page] * self.page + positions % self.page)
        return jnp.asarray(np.concatenate(slots), jnp.int32)

    def _bounds(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(first key seen, position) of the queries of each sequence; the mask is causal and without sink tokens."""
        for q_len, length in self.rows:
            positions = np.arange(length - q_len, length, dtype=np.int64)
            lower = np.zeros_like(positions)
            if self.mask.sliding_window is not None:
                lower = np.maximum(lower, positions - self.mask.sliding_window + 1)
            if self.mask.attention_chunk_size is not None:
                chunk = self.mask.attention_chunk_size
                lower = np.maximum(lower, positions // chunk * chunk)
            yield lower, positions


def hard_lengths(page_size: int, longest: int) -> list[int]:
    """Sequence lengths at which blocks, pages and tiles end, and their neighbours."""
    edges = {0, 1, 2, longest, longest - 1}
    for size in (page_size, 8, 16, 64, 128, 256, 512):
        edges |= {size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}
    return sorted(n for n in edges if 0 <= n <= longest)


def hard_rows(
    rng: np.random.Generator, num_tokens: int, num_rows: int, page_size: int, longest: int, may_be_blind: bool
) -> list[tuple[int, int]]:
    """Rows that fit: one token, ends of tiles and pages, none; `may_be_blind`: fewer tokens than queries, too."""
    lengths = hard_lengths(page_size, longest)
    style = one_of(rng, ["decode", "edges", "prefill", "one", "blind", "none", "mixed", "mixed"])
    rows: list[tuple[int, int]] = []
    left = num_tokens
    count = {"none": 0, "one": 1, "prefill": 1}.get(style, int(rng.integers(1, num_rows + 1)))
    for _ in range(min(count, num_rows)):
        q_len = _query_length(rng, style, left, page_size)
        seq_len = one_of(rng, lengths) if rng.random() < 0.7 else int(rng.integers(0, longest + 1))
        if not (may_be_blind and (style == "blind" or rng.random() < 0.1)):
            seq_len = max(seq_len, q_len)
        q_len = min(q_len, longest)
        rows.append((q_len, min(seq_len, longest)))
        left -= q_len
    return sorted(rows, key=lambda row: row[0] > 1)


def random_rows(rng: np.random.Generator, num_tokens: int, num_rows: int, longest: int) -> list[tuple[int, int]]:
    """(query length, sequence length) of up to `num_rows` sequences, one-token ones first, that fit."""
    rows: list[tuple[int, int]] = []
    budget = num_tokens
    for _ in range(int(rng.integers(0, num_rows + 1))):
        most = min(budget, longest)
        q_len = int(rng.choice([0, 1, 1, 2, int(rng.integers(0, most + 1))])) if most > 1 else most
        seq_len = int(rng.choice([q_len, longest, int(rng.integers(q_len, longest + 1))]))
        rows.append((q_len, seq_len))
        budget -= q_len
    return sorted(rows, key=lambda row: row[0] > 1)


def _query_length(rng: np.random.Generator, style: str, left: int, page_size: int) -> int:
    if style in ("decode", "one") or left <= 1:
        return min(left, int(rng.random() < 0.9))
    if style == "prefill":
        return left
    near = [n + d for n in (8, 16, 32, page_size) for d in (-1, 0, 1)]
    choices = [0, 1, 1, 2, int(rng.integers(0, left + 1)), one_of(rng, near)]
    return min(left, max(0, one_of(rng, choices)))


def on_device(*ints: Any) -> tuple[jax.Array, ...]:
    """As arrays int32."""
    return tuple(jnp.asarray(x, jnp.int32) for x in ints)


def hard_step(rows: list[tuple[int, int]], num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seq_lens, query_start_loc, distribution) of `rows` and padding, one-token rows first."""
    q_lens, lengths = np.array([*rows, *[(0, 0)] * (num_rows - len(rows))], np.int32).reshape(-1, 2).T
    num_decode = sum(q <= 1 for q, _ in rows)
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return lengths, starts, np.array([num_decode, num_decode, len(rows)], np.int32)


@dataclass(frozen=True)
class StepCase(Case, ABC):
    """A step of sequences over pages. `rows` says each, as `words` does; else all are as long as `context`."""

    tokens: int = 512  # query tokens
    seqs: int = 64
    context: int = 8192  # tokens of the longest sequence
    rows: str = ""
    pool: int = 1  # pages are those of a pool; 0: as many as are needed

    @classmethod
    def of_kind(cls, kind: str, step: case.Step) -> Sizes:
        """By `rows_of`."""
        return of_rows(rows_of(kind, step.batch, step.context, step.small)) | {"pool": int(not step.small)}

    def num_pages(self, layout: PageLayout, num_needed: int) -> int:
        """Pages of an array of which so many are needed beside the null page."""
        return pool_pages(layout, num_needed) if self.pool else 1 + num_needed

    @property
    def size(self) -> str:
        """The sequences in words."""
        return words(self.step_rows)

    @property
    def step_rows(self) -> Rows:
        """The sequences of `arguments`."""
        if self.rows:
            return rows_in(self.rows)
        ends = [self.tokens * i // self.seqs for i in range(self.seqs + 1)]
        return tuple((end - start, self.context) for start, end in pairwise(ends))


def of_rows(rows: Rows) -> Sizes:
    """What a step of these rows sets."""
    tokens, context = sum(q for q, _ in rows), max(length for _, length in rows)
    return {"tokens": tokens, "seqs": len(rows), "context": context, "rows": words(rows)}

"""Steps that try sparse latent attention hardest: NaN in every slot that no token names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pallas_kernels.cases.latents import LatentShape, by_state, decoded, hard_tables, laid_out
from pallas_kernels.cases.numbers import random_values
from pallas_kernels.cases.steps import hard_step, random_rows
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.layouts import cdiv
from pallas_kernels.sparse_mla_attention.oracle import attention


@dataclass(frozen=True)
class Shape:
    """Static shape of a step."""

    num_tokens: int = 24
    num_rows: int = 5
    num_columns: int = 40  # of the window's table
    num_q_heads: int = 3
    dim: int = 24
    q_dtype: str = "float32"
    window: int = 5  # 0: none, and picks alone
    ratio: int | None = None  # None: window only
    topk: int | None = None  # None: all entries
    entries: EntryFormat = Plain()  # noqa: RUF009
    latent: LatentShape = field(default_factory=LatentShape)  # of the window's pages
    entry_page_size: int = 3

    @property
    def compressed(self) -> LatentShape:
        """Of the compressed cache's pages."""
        return LatentShape(self.latent.head_dim, self.entry_page_size, self.latent.dtype, self.latent.platform)

    @property
    def entry_columns(self) -> int:
        """Of the compressed cache's table."""
        return cdiv(self.num_columns * self.latent.page_size, (self.ratio or 1) * self.entry_page_size)

    @property
    def sm_scale(self) -> float:
        """Factor on the logits."""
        return self.dim**-0.5


@dataclass(frozen=True)
class Case:
    """Arguments of one call, as numpy, and per token the vectors that it sees."""

    shape: Shape
    q: np.ndarray
    step: tuple[np.ndarray, ...]  # window tables, lengths, starts, distribution
    page: np.ndarray
    compressed: dict[str, Any]
    seen: list[list[np.ndarray]]

    def expected(self, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of the oracle."""
        out = np.zeros(self.q.shape)
        lse = np.full(self.q.shape[:2], -np.inf)
        for t, latents in enumerate(self.seen):
            out[t], lse[t] = attention(self.q[t], latents, self.shape.sm_scale, sinks)
        return out, lse


@dataclass
class _Cache:
    """Pages in the making: one vector per (row, state) that any token sees."""

    shape: Shape
    latent: LatentShape
    num_columns: int
    rng: np.random.Generator

    def make(self, named: list[set[int]]) -> tuple[np.ndarray, np.ndarray, Callable[[int, int], np.ndarray]]:
        """(pages, tables, vector of a row's state) where rows name these states."""
        size, shape = self.latent.page_size, self.shape
        tables, seen = hard_tables(self.rng, named, self.num_columns, size)
        dtype = "float32" if self.latent.dtype == "int8" else self.latent.dtype
        values = random_values(self.rng, (*seen.shape, shape.dim), dtype)
        pages = laid_out(_encoded(values, shape.entries), self.latent, seen)
        vectors = decoded(self._rows(pages), shape.entries, shape.dim)
        return pages, tables, lambda row, state: vectors[tables[row, state // size], state % size]

    def _rows(self, pages: np.ndarray) -> np.ndarray:
        return by_state(pages)[:, : self.latent.page_size, : self.latent.head_dim]


def make_case(seed: int, shape: Shape, rows: Sequence[tuple[int, int]] | None = None) -> Case:
    """A step of `rows` (query length, sequence length), random if None; slots that no token names hold NaN."""
    rng = np.random.default_rng(seed)
    if rows is None:
        rows = random_rows(rng, shape.num_tokens, shape.num_rows, shape.num_columns * shape.latent.page_size)
    padded = [*rows, *[(0, 0)] * (shape.num_rows - len(rows))]
    tokens = [(row, pos) for row, (q_len, n) in enumerate(padded) for pos in range(n - q_len, n)]
    windows = [range(max(0, pos - shape.window + 1), pos + 1) for _, pos in tokens]
    picks, indices = _picks(rng, shape, tokens)
    of_row = [[t for t, (r, _) in enumerate(tokens) if r == row] for row in range(shape.num_rows)]
    window = _Cache(shape, shape.latent, shape.num_columns, rng)
    page, tables, latent = window.make([{k for t in own for k in windows[t]} for own in of_row])
    compressed = _Cache(shape, shape.compressed, shape.entry_columns, rng)
    entry_page, entry_tables, entry = compressed.make([{e for t in own for e in picks[t]} for own in of_row])
    arguments: dict[str, Any] = {"compressed_pages": (entry_page,), "compressed_tables": entry_tables}
    if shape.topk is not None:
        arguments["topk_indices"] = indices
    return Case(
        shape=shape,
        q=random_values(rng, (shape.num_tokens, shape.num_q_heads, shape.dim), shape.q_dtype),
        step=(tables, *hard_step(list(rows), shape.num_rows)),
        page=page,
        compressed={} if shape.ratio is None else arguments,
        seen=[
            [*(latent(row, k) for k in w), *(entry(row, e) for e in p)]
            for (row, _), w, p in zip(tokens, windows, picks, strict=True)
        ],
    )


@functools.partial(jax.jit, static_argnames="entries")
def _encode(values: jax.Array, entries: EntryFormat) -> jax.Array:
    return entries.encode(values)


def _encoded(values: np.ndarray, entries: EntryFormat) -> np.ndarray:
    return values if entries == Plain() else np.asarray(_encode(values, entries))


def _picks(rng: np.random.Generator, shape: Shape, tokens: list[tuple[int, int]]) -> tuple[list[list[int]], np.ndarray]:
    """(entries that each token sees, int32[T, K]): holes and entries of the future among them, junk for padding."""
    indices = rng.integers(-1, 4, (shape.num_tokens, shape.topk or 0)).astype(np.int32)
    picks: list[list[int]] = []
    for t, (_, pos) in enumerate(tokens):
        visible = 0 if shape.ratio is None else (pos + 1) // shape.ratio
        if shape.topk is None:
            picks.append(list(range(visible)))
            continue
        named = rng.permutation(visible + 2)[: shape.topk]
        named = np.where(rng.random(named.size) < 0.2, -1, named)
        indices[t] = -1
        indices[t, rng.permutation(shape.topk)[: named.size]] = named
        picks.append([int(e) for e in named if 0 <= e < visible])
    return picks, indices

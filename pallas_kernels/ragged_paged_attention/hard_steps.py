"""Steps that try attention hardest: ragged sequences over pages in any order, NaN where nobody may look."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.latents import hard_tables
from pallas_kernels.cases.numbers import hidden, random_values
from pallas_kernels.cases.pages import by_token, with_tokens
from pallas_kernels.cases.steps import hard_step, random_rows
from pallas_kernels.layouts import PageLayout, attention_layout
from pallas_kernels.ragged_paged_attention.oracle import Options, attention, seen_keys, unpacked


@dataclass(frozen=True)
class Shape:
    """Static shape of a step: what decides about a compilation."""

    num_tokens: int = 24  # T
    num_rows: int = 5  # S
    num_columns: int = 12  # P
    page_size: int = 4
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    platform: str = "cpu"  # "tpu": packed pages

    @property
    def layout(self) -> PageLayout:
        """The layout of the pages."""
        return attention_layout(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            page_size=self.page_size,
            dtype=self.kv_dtype,
            platform=self.platform,
        )


@dataclass(frozen=True)
class Case:
    """Arguments of one call, as numpy."""

    shape: Shape
    q: np.ndarray  # [T, Hq, D]
    pages: tuple[np.ndarray, ...]
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    distribution: np.ndarray

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The op's positional arguments as jax arrays."""
        pages = tuple(jnp.asarray(p) for p in self.pages)
        rest = (self.block_tables, self.seq_lens, self.query_start_loc, self.distribution)
        return (jnp.asarray(self.q), pages, *(jnp.asarray(x) for x in rest))

    def of_rank(self, rank: int, size: int) -> Case:
        """What a rank of context parallelism has, by the words of the contract; a page here is a column there."""
        own = range(rank, self.shape.page_size, size)

        def of_own(pages: np.ndarray) -> np.ndarray:
            if self.shape.platform != "tpu":
                return pages[:, own]
            heads = self.shape.num_kv_heads
            return with_tokens(pages, heads, by_token(pages, heads, self.shape.head_dim)[:, own])

        return dataclasses.replace(self, pages=tuple(of_own(pages) for pages in self.pages))

    def expected(self, options: Options) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of the oracle."""
        k, v = unpacked(self.pages, self.shape.num_kv_heads, self.shape.head_dim)
        meta = (self.block_tables, self.seq_lens, self.query_start_loc, int(self.distribution[2]))
        return attention(self.q, k, v, *meta, options)


def make_case(
    seed: int,
    shape: Shape,
    rows: Sequence[tuple[int, int]] | None = None,
    options: Options = Options(),  # noqa: B008
    shared_columns: int = 0,  # first columns of the tables in which all sequences name the same pages
) -> Case:
    """A step of `rows` (query length, sequence length), random if None.

    Pages hold NaN (int8: 127) in every slot that no query of its sequence sees. Pages that no query of the sequence
    sees are the null page in the table, as the managers leave them.
    """
    rng = np.random.default_rng(seed)
    longest = shape.num_columns * shape.page_size
    rows = random_rows(rng, shape.num_tokens, shape.num_rows, longest) if rows is None else rows
    assert len(rows) <= shape.num_rows
    assert sum(q for q, _ in rows) <= shape.num_tokens
    assert all(n <= longest for _, n in rows)
    keys = seen_keys(rows, shape.num_rows, options)
    tables, seen = hard_tables(rng, keys, shape.num_columns, shape.page_size, shared_columns)
    pages = tuple(_pages(rng, shape, array.shape(len(seen)), seen) for array in shape.layout.arrays)
    q = random_values(rng, (shape.num_tokens, shape.num_q_heads, shape.head_dim), shape.q_dtype)
    return Case(shape, q, pages, tables, *hard_step(list(rows), shape.num_rows))


def _pages(rng: np.random.Generator, shape: Shape, array: tuple[int, ...], seen: np.ndarray) -> np.ndarray:
    """Random numbers where `seen` (bool[pages, page_size]); page 0 is zero."""
    values = random_values(rng, array, shape.kv_dtype)
    is_packed = shape.platform == "tpu"
    slots = by_token(values, shape.num_kv_heads, shape.head_dim) if is_packed else values
    slots[~seen] = hidden(values.dtype)
    values = with_tokens(values, shape.num_kv_heads, slots) if is_packed else values
    values[0] = np.zeros((), values.dtype)
    return values

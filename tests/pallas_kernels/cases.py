"""Random steps for attention: ragged sequences over pages in random order, with NaN wherever nobody may look."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.cases import steps
from pallas_kernels.cases.compare import TOLERANCE
from pallas_kernels.cases.numbers import random_values
from pallas_kernels.cases.pages import by_token
from pallas_kernels.layouts import attention_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options, attention, unpacked, visible_keys


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


@dataclass(frozen=True)
class Case:
    """Arguments of one call, as numpy."""

    shape: Shape
    q: np.ndarray
    pages: tuple[np.ndarray, ...]
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    distribution: np.ndarray

    @property
    def arrays(self) -> tuple:
        """The op's positional arguments as jax arrays."""
        pages = tuple(jnp.asarray(p) for p in self.pages)
        rest = (self.block_tables, self.seq_lens, self.query_start_loc, self.distribution)
        return (jnp.asarray(self.q), pages, *(jnp.asarray(x) for x in rest))

    def of_rank(self, rank: int, size: int) -> Case:
        """What a rank of context parallelism has, by the words of the contract; a page here is a column there."""
        own = range(rank, self.shape.page_size, size)

        def of_own(pages: np.ndarray) -> np.ndarray:
            tokens = pages.reshape(pages.shape[0], self.shape.page_size, -1)[:, own]  # rows hold one token, or more
            return tokens.reshape(pages.shape[0], pages.shape[1] // size, *pages.shape[2:])

        return dataclasses.replace(self, pages=tuple(of_own(pages) for pages in self.pages))

    def expected(self, options: Options) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of the oracle."""
        k, v = unpacked(self.pages, self.shape.num_kv_heads, self.shape.head_dim)
        meta = (self.block_tables, self.seq_lens, self.query_start_loc, int(self.distribution[2]))
        return attention(self.q, k, v, *meta, options)


def random_rows(rng: np.random.Generator, shape: Shape) -> list[tuple[int, int]]:
    """Rows that fit the shape."""
    return steps.random_rows(rng, shape.num_tokens, shape.num_rows, shape.num_columns * shape.page_size)


def make_case(
    seed: int,
    shape: Shape,
    rows: Sequence[tuple[int, int]] | None = None,
    options: Options = Options(),  # noqa: B008
    shared_columns: int = 0,  # first columns of the tables in which all sequences name the same pages
) -> Case:
    """A step of `rows`, whose pages hold NaN (int8: 127) in every slot that no query of its sequence sees.

    Pages that no query of the sequence sees are the null page in the table, as the managers leave them.
    """
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, shape) if rows is None else rows
    longest, page_size = shape.num_columns * shape.page_size, shape.page_size
    assert len(rows) <= shape.num_rows
    assert sum(q for q, _ in rows) <= shape.num_tokens
    assert all(n <= longest for _, n in rows)
    num_pages = 1 + shape.num_rows * shape.num_columns + 3
    layout = attention_layout(
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        page_size=page_size,
        dtype=shape.kv_dtype,
        platform=shape.platform,
    )
    seen = np.zeros((num_pages, page_size), bool)
    tables = np.zeros((shape.num_rows, shape.num_columns), np.int32)
    free = rng.permutation(np.arange(1, num_pages))
    common, free = free[:shared_columns], free[shared_columns:]
    for s, (q_len, seq_len) in enumerate(rows):
        keys = sorted({k for pos in range(seq_len - q_len, seq_len) for k in visible_keys(pos, seq_len, options)})
        for column in sorted({k // page_size for k in keys}):
            if column < shared_columns:
                tables[s, column] = common[column]
            else:
                tables[s, column], free = free[0], free[1:]
        for k in keys:
            seen[tables[s, k // page_size], k % page_size] = True
    pages = []
    for array in layout.arrays:
        values = random_values(rng, array.shape(num_pages), array.dtype)
        hidden = 127 if array.dtype == "int8" else np.nan
        slots = by_token(values, shape.num_kv_heads) if shape.platform == "tpu" else values
        slots[~seen] = np.array(hidden).astype(values.dtype)
        values[0] = np.zeros((), values.dtype)
        pages.append(values)
    q_lens = [q for q, _ in rows] + [0] * (shape.num_rows - len(rows))
    num_decode = sum(q <= 1 for q, _ in rows)
    return Case(
        shape=shape,
        q=random_values(rng, (shape.num_tokens, shape.num_q_heads, shape.head_dim), shape.q_dtype),
        pages=tuple(pages),
        block_tables=tables,
        seq_lens=np.array([n for _, n in rows] + [0] * (shape.num_rows - len(rows)), np.int32),
        query_start_loc=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        distribution=np.array([num_decode, num_decode, len(rows)], np.int32),
    )


def run(case: Case, options: Options, **extra: Any) -> AttentionOutput:
    """The op on `case`, jitted: one compilation per static shape and options."""
    static = {
        "sm_scale": options.sm_scale,
        "causal": options.causal,
        "sliding_window": options.sliding_window,
        "attention_chunk_size": options.attention_chunk_size,
        "num_sink_tokens": options.num_sink_tokens,
        "soft_cap": options.soft_cap,
        "num_kv_heads": case.shape.num_kv_heads,
    }
    per_head = {"sinks": options.sinks, "k_scale": options.k_scale, "v_scale": options.v_scale}
    given = {name: jnp.asarray(x, jnp.float32) for name, x in per_head.items() if x is not None}
    return _jitted(tuple(static.items()))(*case.arrays, **given, **extra)


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]) -> Callable[..., AttentionOutput]:
    return jax.jit(functools.partial(ragged_paged_attention, return_lse=True, backend="reference", **dict(static)))


def assert_matches_oracle(case: Case, options: Options) -> AttentionOutput:
    """Runs the op on `case`; out and lse are the oracle's. Gives back the result."""
    result = run(case, options)
    out, lse = case.expected(options)
    assert_close(result.out, out, case.shape.q_dtype, "out")
    assert_close(result.lse, lse, "float32", "lse")
    assert result.out.dtype == jnp.dtype(case.shape.q_dtype)
    return result


def static_of(options: Options) -> dict[str, Any]:
    """Keyword arguments of a kernel, but for its own."""
    given = {name: getattr(options, name) for name in ("sinks", "k_scale")}
    return {
        "mask": MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens),
        "sm_scale": options.sm_scale,
        "soft_cap": options.soft_cap,
        **{name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()},
    }


def nan_behind(case: Any) -> Any:
    """A case of any attention with NaN as queries of the tokens of no sequence."""
    q = case.q.copy()
    q[case.query_start_loc[case.distribution[2]] :] = np.nan
    return dataclasses.replace(case, q=q)


def pairwise(factors: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Choices of one level per factor in which every pair of levels of two factors occurs: greedy, from a seed."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    rows = []
    while missing:
        candidates = [{n: int(rng.integers(len(factors[n]))) for n in names} for _ in range(60)]
        (a, i), (b, j) = min(missing)
        candidates = [c | {a: i, b: j} for c in candidates]
        covered = [{((a, c[a]), (b, c[b])) for a, b in itertools.combinations(names, 2)} & missing for c in candidates]
        best = max(range(len(candidates)), key=lambda n: len(covered[n]))
        missing -= covered[best]
        rows.append({n: factors[n][candidates[best][n]] for n in names})
    return rows


def every_level(rows: list[dict[str, Any]]) -> list[int]:
    """Numbers of a few of the rows in which every level of every factor occurs: greedy from the best row and place."""
    levels = [{(name, str(level)) for name, level in row.items()} for row in rows]

    def greedy(first: int, turn: int) -> list[int]:
        """Begins with one row; of rows that add as many levels, it takes the first from `turn` on."""
        chosen, missing = [first], set().union(*levels) - levels[first]
        while missing:
            order = [(n + turn) % len(rows) for n in range(len(rows))]
            chosen.append(max(order, key=lambda n: len(missing & levels[n])))
            missing -= levels[chosen[-1]]
        return sorted(chosen)

    return min((greedy(first, turn) for first in range(len(rows)) for turn in (0, len(rows) // 2)), key=len)


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str, what: str) -> None:
    """Within `TOLERANCE[dtype]` of the largest finite value (of 1 at least); infinities and NaN equal."""
    got, expected = (np.asarray(values).astype(np.float64) for values in (got, expected))
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    limit = TOLERANCE[dtype] * scale
    chex.assert_trees_all_close({what: got}, {what: expected}, rtol=0, atol=limit, strict=True)


def assert_right(
    result: Sequence[np.ndarray], expected: Sequence[np.ndarray], q_dtype: str, lse_dtype: str = "float32"
) -> None:
    """(out, lse) as `assert_close`, head by head: a huge sink of one would hide what is wrong in others."""
    for head in range(expected[0].shape[1]):
        assert_close(result[0][:, head], expected[0][:, head], q_dtype, f"out of head {head}")
        assert_close(result[1][:, head], expected[1][:, head], lse_dtype, f"lse of head {head}")


def as_bytes(tree: Any) -> Any:
    """The arrays of a tree as bytes, which are equal only where every bit is, NaN and signed zeros included."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint8), tree)

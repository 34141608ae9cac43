"""Random steps of latent attention and the oracle's answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.cases.latents import LatentShape, random_pages, random_tables, unpacked
from pallas_kernels.mla_paged_attention import mla_paged_attention
from tests.pallas_kernels import cases
from tests.pallas_kernels.oracle import Options, attention, visible_keys


@dataclass(frozen=True)
class Shape:
    """Static shape of a step."""

    num_tokens: int = 24
    num_rows: int = 5
    num_columns: int = 12
    num_q_heads: int = 3
    rope_dim: int = 8
    q_dtype: str = "float32"
    latent: LatentShape = field(default_factory=LatentShape)


@dataclass(frozen=True)
class Case:
    """Arguments of one call, as numpy."""

    shape: Shape
    q: np.ndarray  # [T, Hq, Dl + Dr]
    page: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    distribution: np.ndarray

    @property
    def arrays(self) -> tuple:
        """The op's positional arguments as jax arrays."""
        q_nope, q_pe = (jnp.asarray(x) for x in np.split(self.q, [-self.shape.rope_dim], axis=-1))
        rest = (self.block_tables, self.seq_lens, self.query_start_loc, self.distribution)
        return (q_nope, q_pe, (jnp.asarray(self.page),), *(jnp.asarray(x) for x in rest))

    def of_rank(self, rank: int, size: int) -> Case:
        """As `cases.Case.of_rank`; packed pages whose states fill their words."""
        page = self.page if self.page.ndim == 3 else self.page.reshape(len(self.page), -1, self.page.shape[3])
        own = page[:, rank::size]
        return dataclasses.replace(self, page=own.reshape(len(own), -1, *self.page.shape[2:]))

    def expected(self, options: Options) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of the oracle: one KV head whose values are the first numbers of its keys."""
        k = unpacked(self.page, self.shape.latent)[:, :, None]
        meta = (self.block_tables, self.seq_lens, self.query_start_loc, int(self.distribution[2]))
        return attention(self.q, k, k[..., : -self.shape.rope_dim], *meta, options)


def make_case(
    seed: int, shape: Shape, rows: Sequence[tuple[int, int]] | None, options: Options, shared_columns: int = 0
) -> Case:
    """A step of `rows` (query length, sequence length), random if None; pages nobody sees are the null page."""
    rng = np.random.default_rng(seed)
    size = shape.latent.page_size
    if rows is None:
        sizes = cases.Shape(shape.num_tokens, shape.num_rows, shape.num_columns, size)
        rows = cases.random_rows(rng, sizes)
    padding = [(0, 0)] * (shape.num_rows - len(rows))
    keys = [{k for pos in range(n - q_len, n) for k in visible_keys(pos, n, options)} for q_len, n in (*rows, *padding)]
    num_pages = 1 + shape.num_rows * shape.num_columns + 3
    live = [{k // size for k in row} for row in keys]
    tables = random_tables(rng, live, shape.num_columns, num_pages, shared_columns)
    seen = np.zeros((num_pages, size), bool)
    for table, row in zip(tables, keys, strict=True):
        for k in row:
            seen[table[k // size], k % size] = True
    q_lens, lens = np.array([*rows, *padding], np.int32).T
    num_decode = sum(q <= 1 for q, _ in rows)
    return Case(
        shape=shape,
        q=cases.random_values(rng, (shape.num_tokens, shape.num_q_heads, shape.latent.head_dim), shape.q_dtype),
        page=random_pages(rng, shape.latent, seen),
        block_tables=tables,
        seq_lens=lens,
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
        "page_size": case.shape.latent.page_size,
    }
    given = {"sinks": options.sinks, "k_scale": options.k_scale}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in given.items() if x is not None}
    return _jitted(tuple(static.items()))(*case.arrays, **arrays, **extra)


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]) -> Callable[..., AttentionOutput]:
    return jax.jit(functools.partial(mla_paged_attention, return_lse=True, backend="reference", **dict(static)))


def assert_matches_oracle(case: Case, options: Options) -> AttentionOutput:
    """Runs the op on `case`; out and lse are the oracle's. Gives back the result."""
    result = run(case, options)
    out, lse = case.expected(options)
    cases.assert_close(result.out, out, case.shape.q_dtype, "out")
    cases.assert_close(result.lse, lse, "float32", "lse")
    assert result.out.dtype == jnp.dtype(case.shape.q_dtype)
    return result

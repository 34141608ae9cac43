"""Steps that try latent attention hardest: ragged sequences over pages in any order, NaN where nobody may look."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.latents import LatentShape, by_state, hard_tables, random_pages, unpacked, with_states
from pallas_kernels.cases.numbers import random_values
from pallas_kernels.cases.steps import hard_step, random_rows
from pallas_kernels.ragged_paged_attention.oracle import Options, attention, seen_keys


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
    def arrays(self) -> tuple[Any, ...]:
        """The op's positional arguments as jax arrays."""
        q_nope, q_pe = (jnp.asarray(x) for x in np.split(self.q, [-self.shape.rope_dim], axis=-1))
        rest = (self.block_tables, self.seq_lens, self.query_start_loc, self.distribution)
        return (q_nope, q_pe, (jnp.asarray(self.page),), *(jnp.asarray(x) for x in rest))

    def of_rank(self, rank: int, size: int) -> Case:
        """As `cases.Case.of_rank`; packed pages whose states fill their words."""
        own = by_state(self.page)[:, rank::size]
        return dataclasses.replace(self, page=with_states(self.page, own))

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
        rows = random_rows(rng, shape.num_tokens, shape.num_rows, shape.num_columns * size)
    keys = seen_keys(rows, shape.num_rows, options)
    tables, seen = hard_tables(rng, keys, shape.num_columns, size, shared_columns)
    lens, starts, distribution = hard_step(list(rows), shape.num_rows)
    return Case(
        shape=shape,
        q=random_values(rng, (shape.num_tokens, shape.num_q_heads, shape.latent.head_dim), shape.q_dtype),
        page=random_pages(rng, shape.latent, seen),
        block_tables=tables,
        seq_lens=lens,
        query_start_loc=starts,
        distribution=distribution,
    )

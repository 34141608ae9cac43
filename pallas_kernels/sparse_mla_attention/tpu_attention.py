"""Attention of a block's rows over vectors that are keys and values at once: online softmax, state, result.

Flow:    queries + vectors in VMEM -> [LatentAttention.update] -> PassState -> the next pass, or [finish] -> out, lse

Rows are those of all heads of a block of tokens, heads innermost. Logits are in base 2; a row's largest logit `m`
stands in all 128 lanes and its weight is a sum per lane, as `tpu.softmax` has them. A pass leaves its state in
HBM for the next one; sinks are one more logit of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.base2 import HIDDEN, LOG2E, NOTHING, dot, spread
from pallas_kernels.tpu.lse import heads_to_lanes
from pallas_kernels.tpu.mosaic import LANES, Ref
from pallas_kernels.tpu.softmax import add_weights, inverse, largest, natural_lse, sums, weights
from pallas_kernels.tpu.token_specs import MOST_ROWS


class PassState(NamedTuple):
    """Softmax state of the rows of all tokens between two passes; as arrays or as references."""

    acc: Any  # float32[rows, lanes]
    weight: Any  # float32[rows, 128]
    m: Any  # float32[rows, 128]


@dataclass(frozen=True)
class LatentAttention:
    """Attention of one block of rows; `state` holds it in VMEM."""

    state: PassState
    scale: float  # on raw scores: natural-log logits

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return self.state.m.shape[0]

    @property
    def chunk(self) -> int:
        """Rows that are attended at a time."""
        return min(self.num_rows, MOST_ROWS)

    def over_chunks(self, body: Callable[[jax.Array | int, Any], None]) -> None:
        """`body(first row, slice of rows)` for all rows, a chunk at a time."""
        size = self.chunk
        if self.num_rows == size:
            body(0, pl.ds(0, size))
            return

        def one(c: jax.Array, carry: None) -> None:
            first = pl.multiple_of(c * size, size)
            body(first, pl.ds(first, size))
            return carry

        lax.fori_loop(0, self.num_rows // size, one, None)

    def reset(self) -> None:
        """State of rows that have seen nothing."""

        def one(_: Any, rows: Any) -> None:
            for ref, value in zip(self.state, (0.0, 0.0, NOTHING), strict=True):
                ref[rows] = jnp.full((self.chunk, ref.shape[1]), value, ref.dtype)

        self.over_chunks(one)

    def copy(self, source: PassState, target: PassState) -> None:
        """Copies one state in VMEM to another."""

        def one(_: Any, rows: Any) -> None:
            for a, b in zip(source, target, strict=True):
                b[rows] = a[rows]

        self.over_chunks(one)

    def update(self, rows: Any, q: jax.Array, vectors: jax.Array, seen: jax.Array) -> None:
        """The state of `rows` after the vectors [n, lanes] that are `seen`, bool[chunk or 1, n]."""
        acc, weight, m = self.state
        s = dot(q, vectors, (((1,), (1,)), ((), ()))) * (self.scale * LOG2E)
        s = jnp.where(seen, s, HIDDEN)
        old = m[rows]
        new = largest(s, old)
        m[rows] = new
        p, shrink = weights(s, old, new)
        weight[rows] = add_weights(weight[rows], shrink, p)
        weighted = dot(p.astype(vectors.dtype), vectors, (((1,), (0,)), ((), ())))
        acc[rows] = acc[rows] * spread(shrink, weighted.shape[1]) + weighted

    def finish(self, sinks: Ref | None, out: Ref, lse: Ref | None) -> None:
        """Writes results, and LSE [tokens, 1, 128] if that is wanted; `sinks` float32[chunk, 128] of rows, base 2."""

        def one(first: Any, rows: Any) -> None:
            m = self.state.m[rows]
            total = sums(self.state.weight[rows])
            shrink = None
            if sinks is not None:
                top = jnp.maximum(m, sinks[...])
                shrink = jnp.exp2(m - top)
                total = total * shrink + jnp.exp2(sinks[...] - top)
                m = top
            factor = inverse(total)
            factor = factor if shrink is None else factor * shrink
            out[rows] = (self.state.acc[rows] * spread(factor, out.shape[1])).astype(out.dtype)
            if lse is not None:
                heads = self.num_rows // lse.shape[0]
                value = natural_lse(m, total).reshape(-1, heads, LANES)
                lse[pl.ds(first // heads, value.shape[0])] = heads_to_lanes(value)

        self.over_chunks(one)

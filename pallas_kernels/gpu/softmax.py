"""Online softmax of 64 query rows over KV blocks, in the registers of one warpgroup.

Flow:    query tile in shared memory + KVRing -> [attend] per block -> [finish] -> normalised rows, LSE
Source:  online softmax of FlashAttention (arXiv 2205.14135), with the exponentials base 2

`m` and the scores are in units of log2(e); rows that have seen no key have weight 0. As in online_softmax.py, whether
a row has seen a key is read off its weight, so that a NaN among what it sees comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.kv import KVRing
from pallas_kernels.gpu.plan import GpuConfig, Keys

LOG2_E = math.log2(math.e)
LARGEST = np.finfo(np.float32).max


class RowState(NamedTuple):
    """Softmax over the keys so far; see online_softmax.SoftmaxState."""

    m: jax.Array  # float32[64]
    weight: jax.Array  # float32[64]
    total: Any  # float32[64, Dv]; None: kept elsewhere

    @classmethod
    def empty(cls, head_dim_v: int | None) -> RowState:
        """Rows that have seen no key; None: without `total`."""
        rows = mosaic.ROWS
        m = mosaic.per_row(jnp.full((rows,), -jnp.inf, jnp.float32))
        weight = mosaic.per_row(jnp.zeros((rows,), jnp.float32))
        if head_dim_v is None:
            return cls(m, weight, None)
        return cls(m, weight, mosaic.matrix(jnp.zeros((rows, head_dim_v), jnp.float32)))

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """(out float32[64, Dv], natural-log LSE float32[64]): 0 and -inf for rows that saw no key."""
        share, lse = self.finish_weight()
        return self.total * mosaic.spread(share, self.total.shape[1]), lse

    def finish_weight(self) -> tuple[jax.Array, jax.Array]:
        """(what `total` is multiplied with, natural-log LSE), float32[64] each."""
        nothing = self.weight == 0.0
        weight = jnp.where(nothing, 1.0, self.weight)
        return 1.0 / weight, jnp.where(nothing, -jnp.inf, self.m * (1.0 / LOG2_E) + jnp.log(weight))

    def finish_with_sinks(self, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `finish`, with a natural-log logit float32[64] without a value for each row, -inf: none."""
        share, lse = self.finish_weight_with_sinks(sinks)
        return self.total * mosaic.spread(share, self.total.shape[1]), lse

    def finish_weight_with_sinks(self, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `finish_weight`, with sinks; natural-log units, so that no finite sink overflows."""
        nothing = self.weight == 0.0
        own = self.m * (1.0 / LOG2_E)
        m = lax.max(own, sinks)
        finite = jnp.where(m == -jnp.inf, 0.0, m)
        shrink = jnp.exp2((own - finite) * LOG2_E)
        weight = self.weight * shrink + jnp.exp2((sinks - finite) * LOG2_E)
        weight = jnp.where(nothing, 1.0, weight)
        return shrink / weight, jnp.where(nothing, -jnp.inf, m + jnp.log(weight))


class RowBounds(NamedTuple):
    """First and last key that each row sees, sink tokens apart; int32[64], or int32[] for all rows."""

    lower: jax.Array
    upper: jax.Array


def score_factor(sm_scale: float, soft_cap: float | None) -> float:
    """What products of queries and keys are multiplied with, beside the scale of the keys."""
    return sm_scale * (LOG2_E if soft_cap is None else 1.0 / soft_cap)


def capped_sink(sink: jax.Array) -> jax.Array:
    """A natural-log logit, an infinite one as the largest number: its rows give 0 and that LSE."""
    return lax.min(sink, LARGEST)


def as_scales(scale: jax.Array | None) -> jax.Array:
    """float32[1 or Hkv] of an optional scalar or scale per head; costs no launch where it is float32."""
    return jnp.ones((1,), jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32).reshape(-1)


def as_sinks(sinks: jax.Array | None) -> jax.Array:
    """float32[1 or Hq] of optional natural-log logits per query head, -inf: none; costs no launch where it is float32.

    Many equal numbers would cost one: XLA makes a constant of them while the step runs.
    """
    return jnp.full((1,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)


def of_head(values: Any, head: jax.Array) -> jax.Array:
    """float32[] of one head, of `as_scales` or `as_sinks` in global memory."""
    return values[0] if values.shape[0] == 1 else values[head]  # type: ignore[no-any-return]


def row_sinks(sinks: Any, part: jax.Array, heads: int, largest: Any = LARGEST) -> jax.Array:
    """float32[64] of rows `token * heads + head`: sinks of `heads` query heads, the `part`-th ones, at most `largest`.

    `sinks`: of `as_sinks`, in global memory.
    """
    first = part * heads
    if heads == mosaic.ROWS and sinks.shape[0] > 1:
        own = mosaic.load_per_row(sinks.at[pl.ds(pl.multiple_of(first, heads), heads)])
        return jnp.minimum(own, largest)
    head = lax.rem(mosaic.row_index(mosaic.ROWS), jnp.int32(heads))
    rows = mosaic.per_row(jnp.full((mosaic.ROWS,), -jnp.inf, jnp.float32))
    for number in range(heads if sinks.shape[0] > 1 else 1):
        rows = jnp.where(head >= number, lax.min(of_head(sinks, first + number), largest), rows)
    return rows


class Turns(NamedTuple):
    """Two warpgroups that use the tensor cores by turns; each change waits for the other warpgroup's.

    Warpgroup 0 begins, warpgroup 1 changes once more before its first block, warpgroup 0 once more after its last:
    both change 2 n + 1 times in n blocks, so that none waits for ever.

        warpgroup 0    QK 0 | softmax 0          | PV 0, QK 1 | softmax 1   | PV 1
        warpgroup 1         | QK 0               | softmax 0  | PV 0, QK 1  | softmax 1 ...
        change              0                    1            2             3
    """

    barrier: Any  # of two arrivals
    warpgroup: jax.Array

    def begin(self) -> None:
        """Before the first block."""
        pl.when(self.warpgroup == 1)(self.change)

    def change(self) -> None:
        """The products of this turn are issued, or this warpgroup is ready for the next turn."""
        plgpu.barrier_arrive(self.barrier)
        self.wait()

    def wait(self) -> None:
        """Waits until both warpgroups have come to a change of turns."""
        plgpu.barrier_wait(self.barrier)

    def end(self) -> None:
        """After the last block."""
        pl.when(self.warpgroup == 0)(self.change)


class Reader(NamedTuple):
    """What one warpgroup attends KV blocks with."""

    ring: KVRing
    q: Any  # [64, D] shared memory
    scale: jax.Array  # float32[]: of the keys, times `score_factor`
    is_positive: bool = False  # whether `scale` is known not to be negative, which saves a product for each score
    turns: Turns | None = None  # with another warpgroup


def attend(
    state: RowState,
    reader: Reader,
    keys: Keys,
    bounds: RowBounds | None,  # None: every row sees the whole block
    i: jax.Array,
    step: jax.Array,
    fetch_k: Callable[[], None] = lambda: None,
    fetch_v: Callable[[], None] = lambda: None,
) -> RowState:
    """`state` after the `i`-th block of `keys`, which is step `step` of the ring.

    `fetch_k` and `fetch_v` run where the other warpgroup has read K and V of the step before, or will without this one.
    """
    ring, turns = reader.ring, reader.turns
    config = ring.config
    k = ring.take_k(step)

    def meanwhile() -> None:
        if turns is not None:
            turns.change()
        fetch_k()

    products = mosaic.dot_transposed(reader.q, k, meanwhile)
    ring.release_k(step)
    first_slot = keys.block(i) * config.block
    if bounds is None and config.soft_cap is None and reader.is_positive:
        state, p = add_products(state, products, reader.scale, config.compute_dtype)
    else:
        state, p = weigh(state, products * reader.scale, config, keys, bounds, first_slot)
    if turns is not None:
        state, p = lax.optimization_barrier((state, p))
        turns.change()
    fetch_v()
    v = ring.take_v(step, None if bounds is None else seen_by_any(config, keys, first_slot))
    total = mosaic.dot_add(state.total, p, v)
    ring.release_v(step)
    return state._replace(total=total)


def weigh(
    state: RowState,
    scores: jax.Array,  # float32[64, block] products times the scale of the keys and `score_factor`
    config: GpuConfig,
    keys: Keys,
    bounds: RowBounds | None,
    first_slot: jax.Array,  # int32[] of the block, in the run
) -> tuple[RowState, jax.Array]:
    """(`state` with all but the block's values added to `total`, weights of the values [64, block])."""
    scores = _capped(scores, config.soft_cap)
    if bounds is not None:
        slot = mosaic.column_index(*scores.shape) + first_slot
        scores = jnp.where(_visible(config, keys, slot, bounds), scores, -jnp.inf)
    return add_scores(state, scores, config.compute_dtype)


def add_scores(state: RowState, scores: jax.Array, dtype: Any) -> tuple[RowState, jax.Array]:
    """As `weigh`, with logits float32[64, n] in units of log2(e), -inf where a row does not see a key."""
    m = lax.max(state.m, jnp.max(scores, axis=1))
    return _add(state, m, lambda finite: scores - finite, scores.shape[1], dtype)


def add_products(state: RowState, products: jax.Array, scale: jax.Array, dtype: Any) -> tuple[RowState, jax.Array]:
    """As `add_scores` of `products * scale`, with no negative scale: a row's maximum is scaled, not its scores."""
    m = lax.max(state.m, jnp.max(products, axis=1) * scale)
    return _add(state, m, lambda finite: products * scale - finite, products.shape[1], dtype)


def _add(
    state: RowState, m: jax.Array, less: Callable[[jax.Array], jax.Array], num_columns: int, dtype: Any
) -> tuple[RowState, jax.Array]:
    """With `less(x)`, scores less `x`, all float32[64, num_columns]."""
    finite = jnp.where(m == -jnp.inf, 0.0, m)
    shrink = jnp.exp2(state.m - finite)
    p = jnp.exp2(less(mosaic.spread(finite, num_columns)))
    weight = state.weight * shrink + jnp.sum(p, axis=1)
    total = None if state.total is None else state.total * mosaic.spread(shrink, state.total.shape[1])
    return RowState(m, weight, total), p.astype(dtype)


def seen_by_any(config: GpuConfig, keys: Keys, first_slot: jax.Array) -> Callable[[int], jax.Array]:
    """(first row) -> bool[64]: which of 64 slots of a block any query sees."""

    def seen(first_row: int) -> jax.Array:
        slot = mosaic.row_index(mosaic.ROWS) + (first_slot + first_row)
        return _visible(config, keys, slot, RowBounds(keys.lower, keys.upper))

    return seen


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Capped logits in units of log2(e). tanh by way of exp2, whose approximation is good to float32's last bits."""
    if soft_cap is None:
        return scores
    ratio = 1.0 / (jnp.exp2(scores * (2.0 * LOG2_E)) + 1.0)
    return (1.0 - 2.0 * ratio) * (soft_cap * LOG2_E)


def _visible(config: GpuConfig, keys: Keys, slot: jax.Array, bounds: RowBounds) -> jax.Array:
    """Whether rows see the keys in slots of the run: int32[rows, slots], or int32[slots] with scalar bounds."""
    mask, page_size = config.mask, config.page_size
    key = slot + jnp.where(slot < keys.sink_pages * page_size, 0, keys.shift * page_size)
    lower, upper = (x if x.ndim == 0 else mosaic.spread(x, slot.shape[1]) for x in (bounds.lower, bounds.upper))
    return mask.within(key, lower, upper, keys.sink_tokens)

"""Attention of a decoding token's rows over one KV block of the TPU kernel: scores, mask, online softmax, values.

Flow:    queries and KV block in VMEM -> [BlockAttention.attend] -> m, l, acc in VMEM -> [finish] -> out, lse

Logits are in base 2; `m` and `l`, a row's largest logit and its weight, are as `tpu.softmax` has them, a row a sublane.
`m` starts above the score of a hidden key, so that a row that has seen nothing keeps weight 0; or at the sink, with
weight 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks
from pallas_kernels.ragged_paged_attention.tpu_plan import TpuConfig
from pallas_kernels.ragged_paged_attention.tpu_refs import Refs
from pallas_kernels.tpu.base2 import HIDDEN, NOTHING, base2_logits, dot, spread
from pallas_kernels.tpu.block_mask import BlockMask, block_mask
from pallas_kernels.tpu.mosaic import LANES, packing
from pallas_kernels.tpu.softmax import add_weights, inverse, largest, natural_lse, sink_m, sink_weight, sums, weights

_SHORT_PART = 256  # slots that decode attends of a masked block that has no more


class Product(NamedTuple):
    """Which matrix product: `base` (traced, or 0) plus `offset` (static)."""

    base: Any
    offset: int

    @property
    def index(self) -> Any:
        """Its number."""
        return self.base + self.offset


class Part(NamedTuple):
    """Slots of a block that one softmax update covers."""

    first: int
    size: int


@dataclass(frozen=True)
class BlockAttention:
    """One item's attention."""

    config: TpuConfig
    kv: KVBlocks
    refs: Refs
    item: jax.Array
    place: jax.Array  # of its token among those of the step of the grid

    def reset(self) -> None:
        """State of rows that have seen nothing, or only their sink."""
        refs = self.refs
        config = self.config
        refs.acc[...] = jnp.zeros_like(refs.acc)
        if not config.has_sinks:
            refs.l[...] = jnp.zeros_like(refs.l)
            refs.m[...] = jnp.full_like(refs.m, NOTHING)
            return
        sinks = refs.sinks[...]
        refs.m[...] = sink_m(sinks)
        refs.l[...] = sink_weight(sinks)

    def attend(self, slot: jax.Array, block: jax.Array | None, num_slots: jax.Array | None) -> None:
        """One block for all heads; `block` None: every row sees all of it.

        `num_slots`: no row sees any after those, and parts that lie behind them are skipped.
        """
        size, part = self.config.block, self.config.part
        parts = [Part(first, part) for first in range(0, size, part)]
        if block is None or num_slots is None:
            self._attend_parts(slot, block, parts)
        elif len(parts) > 1:
            for some in parts:
                pl.when(some.first < num_slots)(functools.partial(self._attend_parts, slot, block, [some]))
        elif part > _SHORT_PART:
            short = functools.partial(self._attend_parts, slot, block, [Part(0, _SHORT_PART)])
            lax.cond(num_slots <= _SHORT_PART, short, functools.partial(self._attend_parts, slot, block, parts))
        else:
            self._attend_parts(slot, block, parts)

    def _attend_parts(self, slot: jax.Array, block: jax.Array | None, parts: list[Part]) -> None:
        config = self.config
        masks = {part: None if block is None else self._mask(block, part) for part in parts}

        def some(products: list[Product]) -> None:
            for product in products:
                for part in parts:
                    self._update(product, part, self._scores(product, part, slot), slot, masks[part])

        for_products(config, self.kv.buffer.dtype, some)

    def finish(self) -> Iterator[tuple[int, jax.Array]]:
        """(product, float32[rows, lanes] results) of each product; leaves its LSE in `m` if that is wanted."""
        config, refs = self.config, self.refs
        for i in range(config.num_products):
            total = sums(refs.l[i])
            factor = inverse(total)
            if config.has_v_scale:
                factor = factor * refs.v_scale[i]
            if config.return_lse:
                refs.m[i] = natural_lse(refs.m[i], total)
            yield i, self._own_columns(refs.acc[i]) * spread(factor, config.lanes)

    def _heads(
        self, product: Product, part: Part, slot: jax.Array, value: int, kept: jax.Array | None = None
    ) -> list[jax.Array]:
        """K or V of each of the product's heads, [part, lanes]; zero where not `kept`."""
        heads = self.config.heads
        base, first = product.base * heads, product.offset * heads
        return [self.kv.load(slot, (base, first + h), value, *part, kept) for h in range(heads)]

    def _values(self, product: Product, part: Part, slot: jax.Array, kept: jax.Array | None) -> jax.Array:
        """V of the product's heads side by side, [part, heads * lanes]; zero where not `kept`."""
        columns = self._heads(product, part, slot, 1, kept)
        return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)

    def _scores(self, product: Product, part: Part, slot: jax.Array) -> jax.Array:
        """float32[rows, part]: a sum of products over 128 lanes each, zero where they are not a row's.

        libtpu 0.0.52 transposes keys before it pushes them for a deeper product, which takes half as long again.
        """
        q, lanes, depth = self.refs.q[self.place, product.index], self.config.lanes, LANES
        scores = [
            dot(q[:, head * lanes + n : head * lanes + n + depth], k[:, n : n + depth], (((1,), (1,)), ((), ())))
            for head, k in enumerate(self._heads(product, part, slot, 0))
            for n in range(0, lanes, depth)
        ]
        return sum(scores[1:], scores[0])

    def _update(self, product: Product, part: Part, s: jax.Array, slot: jax.Array, mask: BlockMask | None) -> None:
        """Merges a part's scores and values into m, l and acc."""
        config, refs, i = self.config, self.refs, product.index
        s = base2_logits(s, config.sm_scale, config.soft_cap, refs.k_scale[i] if config.has_k_scale else None)
        if mask is not None:
            s = jnp.where(mask.seen, s, HIDDEN)
        old = refs.m[i]
        new = largest(s, old)
        refs.m[i] = new
        p, shrink = weights(s, old, new)
        v = self._values(product, part, slot, None if mask is None else mask.kept)  # here: later or sooner costs more
        refs.l[i] = add_weights(refs.l[i], shrink, p)
        acc = refs.acc[i] * spread(shrink, config.columns)
        refs.acc[i] = acc + self._weighted(p.astype(config.compute_dtype), v)

    def _weighted(self, p: jax.Array, v: jax.Array) -> jax.Array:
        """`p @ v`: halves of the keys apart, so that the first can begin while the other is pushed."""
        count = p.shape[1]
        half = count // 2 if count > LANES else count
        parts = [dot(p[:, n : n + half], v[n : n + half], (((1,), (0,)), ((), ()))) for n in range(0, count, half)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _mask(self, block: jax.Array, part: Part) -> BlockMask:
        config = self.config
        mask = block_mask(
            self.kv.items,
            self.item,
            block,
            None,
            first=part.first,
            part=(config.rows, part.size),
            lanes=config.lanes,
        )
        if config.tokens_per_row == 1:
            return mask
        return mask._replace(kept=self.kv.kept_bits(self.item, block, *part))

    def _own_columns(self, acc: jax.Array) -> jax.Array:
        """The results of each row with the V of its own head, [rows, lanes]."""
        config = self.config
        out = acc[:, : config.lanes]
        row = lax.broadcasted_iota(jnp.int32, out.shape, 0)
        for head in range(1, config.heads):
            own = acc[:, head * config.lanes : (head + 1) * config.lanes]
            out = jnp.where(row >= head * config.group, own, out)
        return out


def head_trips(config: TpuConfig, dtype: jnp.dtype) -> int:
    """Trips of the loop over the heads of a block."""
    return config.num_products // _unrolled(config, dtype)


def for_products(config: TpuConfig, dtype: jnp.dtype, some: Callable[[list[Product]], None]) -> None:
    """Calls `some` with all products of a block, or in a loop over so many as are unrolled; `dtype`: of the pages."""
    unrolled = _unrolled(config, dtype)
    if unrolled == config.num_products:
        some([Product(0, i) for i in range(unrolled)])
        return

    def trip(i: jax.Array, carry: None) -> None:
        some([Product(i * unrolled, offset) for offset in range(unrolled)])
        return carry

    lax.fori_loop(0, head_trips(config, dtype), trip, None)


def _unrolled(config: TpuConfig, dtype: jnp.dtype) -> int:
    """Products of one trip of the loop over heads: all, or a divisor whose heads fill whole words."""
    if config.num_products <= config.max_unrolled:
        return config.num_products
    fits = [
        n
        for n in range(1, config.max_unrolled + 1)
        if config.num_products % n == 0 and n * config.heads * 2 % packing(dtype) == 0
    ]
    return max(fits, default=config.num_products)

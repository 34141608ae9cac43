"""Attention of a tile of several queries over KV blocks of the TPU kernel: keys in sublanes, rows of queries in lanes.

Flow:    tile of queries -> [TileAttention.load_queries] -> columns; with KV blocks in VMEM -> [attend] -> m, l, acc
         -> [finish] -> out, lse

Scores are `K q^T`, and results add up as `V^T P^T`. So a row's largest logit, its weight and the factor that shrinks
its results are one number in a lane, 8 sublanes alike, where rows in sublanes would need a register for every 8 of
them; the largest logit comes from comparing registers; and both products fill all columns of the matrix unit, whatever
the head dimension. Logits are in base 2; `l` is a sum per sublane. `m` starts as `BlockAttention`'s does.

Where the head dimension leaves half of the matrix unit's depth idle (`scales_queries`), queries come scaled, as the sum
of two numbers of their dtype, whose products with the keys the unit adds: so scores need no scaling. Rows are padded to
whole registers with whatever the scratch holds: lanes do not mix.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import tpu_rows
from pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks
from pallas_kernels.ragged_paged_attention.tpu_plan import TpuConfig
from pallas_kernels.ragged_paged_attention.tpu_refs import Refs, TileRefs
from pallas_kernels.ragged_paged_attention.tpu_softmax import Part, Product, for_products
from pallas_kernels.tpu.base2 import HIDDEN, LOG2E, NOTHING, dot, spread
from pallas_kernels.tpu.block_mask import BlockMask, kept_slots, seen_slots
from pallas_kernels.tpu.lse import lse_shape
from pallas_kernels.tpu.mosaic import LANES, SUBLANES
from pallas_kernels.tpu.softmax import add_weights, inverse, largest, natural_lse, sink_m, sink_weight, sums, weights

_ROWS_AHEAD = 1024  # whose scores are under way while a softmax is computed
_CUT_PART = 256  # slots that are attended at once of blocks that need a mask


def state_shapes(config: TpuConfig) -> dict[str, Any]:
    """m, l and acc."""
    rows, products = config.padded_rows, config.num_products
    return {
        "m": pltpu.VMEM((products, SUBLANES, rows), jnp.float32),
        "l": pltpu.VMEM((products, SUBLANES, rows), jnp.float32),
        "acc": pltpu.VMEM((products, config.lanes, rows), jnp.float32),
    }


def scratch_shapes(config: TpuConfig, q_rows: jax.Array) -> TileRefs:
    """The scratch of a tile; `q_rows`: all queries as `tpu_rows.tile_queries` has them."""
    rows, products = config.padded_rows, config.num_products
    dtype = jnp.dtype(config.compute_dtype)
    depth = config.lanes * (2 if config.scales_queries else 1)
    tile = pltpu.VMEM((config.queries, *q_rows.shape[1:]), q_rows.dtype)
    lse_rows, lse = None, None
    if config.return_lse:
        lse_rows = pltpu.VMEM((products, rows, LANES), jnp.float32)
        lse = pltpu.VMEM(lse_shape(config.queries, tpu_rows.lse_rows(config)), jnp.float32)
    return TileRefs(
        rows=pltpu.VMEM((rows, config.lanes), dtype),
        columns=pltpu.VMEM((products, depth, rows), dtype),
        scores=pltpu.VMEM((_scores_ahead(config) + 1, config.part, rows), jnp.float32),
        lse_rows=lse_rows,
        q=tile,
        q_arrived=pltpu.SemaphoreType.DMA,
        out=tile,
        lse=lse,
        left=pltpu.SemaphoreType.DMA,
    )


@dataclass(frozen=True)
class TileAttention:
    """One item's attention. A product is a KV head."""

    config: TpuConfig
    kv: KVBlocks
    refs: Refs
    tile: TileRefs
    item: jax.Array

    def load_queries(self) -> None:
        """The queries of the tile that has arrived, rows in lanes."""
        config, tile = self.config, self.tile
        for head in range(config.num_products):
            tpu_rows.unpack_head(tile.q, head, tile.rows, config)
            x = tile.rows[...].T
            if not config.scales_queries:
                tile.columns[head] = x
                continue
            x = x.astype(jnp.float32) * self._scale(head, config.lanes)
            high = x.astype(tile.columns.dtype)
            tile.columns[head, : config.lanes] = high
            tile.columns[head, config.lanes :] = (x - high.astype(jnp.float32)).astype(high.dtype)

    def reset(self) -> None:
        """State of rows that have seen nothing, or only their sink."""
        refs = self.refs
        refs.acc[...] = jnp.zeros_like(refs.acc)
        if not self.config.has_sinks:
            refs.l[...] = jnp.zeros_like(refs.l)
            refs.m[...] = jnp.full_like(refs.m, NOTHING)
            return
        sinks = refs.sinks[...]
        refs.m[...] = sink_m(sinks)
        refs.l[...] = sink_weight(sinks, axis=0)

    def attend(self, slot: jax.Array, block: jax.Array | None, num_slots: jax.Array | None) -> None:
        """One block for all heads; `block` None: every row sees all of it.

        `num_slots`: no row sees any after those, and parts that lie behind them are skipped.
        """
        size = self.config.block
        part = self.config.part if block is None else min(_CUT_PART, size)
        parts = [Part(first, part) for first in range(0, size, part)]
        if block is None or num_slots is None or len(parts) == 1:
            self._attend_parts(slot, block, parts)
            return
        for some in parts:
            pl.when(some.first < num_slots)(functools.partial(self._attend_parts, slot, block, [some]))

    def finish(self) -> Iterator[tuple[int, jax.Array]]:
        """(head, [rows, lanes] results in the queries' dtype) of each; leaves its LSE in `lse_rows` if wanted."""
        config, refs = self.config, self.refs
        for head in range(config.num_products):
            total = sums(refs.l[head], axis=0)
            factor = inverse(total)
            if config.has_v_scale:
                factor = factor * refs.v_scale[head]
            if config.return_lse:
                self.tile.lse_rows[head] = spread(natural_lse(refs.m[head], total), LANES, 0).T
            out = refs.acc[head] * spread(factor, config.lanes, 0)
            yield head, out.astype(self.tile.columns.dtype).T[: config.rows]

    def _attend_parts(self, slot: jax.Array, block: jax.Array | None, parts: list[Part]) -> None:
        masks = {part: None if block is None else self._mask(block, part) for part in parts}

        def some(products: list[Product]) -> None:
            work = [(product, part) for product in products for part in parts]
            for product, part, scores in self._scores_ahead(work, slot):
                self._update(product, part, scores, slot, masks[part])

        for_products(self.config, self.kv.buffer.dtype, some)

    def _scores_ahead(
        self, work: list[tuple[Product, Part]], slot: jax.Array
    ) -> Iterator[tuple[Product, Part, jax.Array]]:
        """(product, part, scores); the next ones are computed before the last are used."""
        buffers, ahead = self.tile.scores, _scores_ahead(self.config)
        for n in range(len(work) + ahead):
            if n < len(work):
                product, part = work[n]
                buffers[n % (ahead + 1), : part.size] = self._scores(product, part, slot)
            if n >= ahead:
                product, part = work[n - ahead]
                yield product, part, buffers[(n - ahead) % (ahead + 1), : part.size]

    def _scores(self, product: Product, part: Part, slot: jax.Array) -> jax.Array:
        """float32[slots, rows]."""
        k = self._load(product, part, slot, 0)
        if self.config.scales_queries:
            k = jnp.concatenate([k, k], axis=1)
        return dot(k, self.tile.columns[product.index], (((1,), (0,)), ((), ())))

    def _load(
        self, product: Product, part: Part, slot: jax.Array, value: int, kept: jax.Array | None = None
    ) -> jax.Array:
        """K or V of the product's head, [slots, lanes]; zero where not `kept`."""
        return self.kv.load(slot, (product.base, product.offset), value, *part, kept)

    def _update(self, product: Product, part: Part, s: jax.Array, slot: jax.Array, mask: BlockMask | None) -> None:
        """Merges a part's scores and values into m, l and acc."""
        config, refs, i = self.config, self.refs, product.index
        if not config.scales_queries:
            s = s * self._scale(i, part.size)
        if config.soft_cap is not None:
            s = jnp.tanh(s) * (config.soft_cap * LOG2E)
        if mask is not None:
            s = jnp.where(mask.seen, s, HIDDEN)
        old = refs.m[i]
        new = largest(s, old, axis=0)
        refs.m[i] = new
        p, shrink = weights(s, old, new, axis=0)
        refs.l[i] = add_weights(refs.l[i], shrink, p, axis=0)
        v = self._load(product, part, slot, 1, None if mask is None else mask.kept)
        weighted = dot(v, p.astype(v.dtype), (((0,), (0,)), ((), ())))
        refs.acc[i] = refs.acc[i] * spread(shrink, config.lanes, 0) + weighted

    def _scale(self, head: Any, count: int) -> Any:
        """What raw scores are multiplied by before the soft cap, or to be logits: a number, or float32[count, rows]."""
        config = self.config
        scale = config.sm_scale * LOG2E if config.soft_cap is None else config.sm_scale / config.soft_cap
        return spread(self.refs.k_scale[head] * scale, count, 0) if config.has_k_scale else scale

    def _mask(self, block: jax.Array, part: Part) -> BlockMask:
        config, items, token = self.config, self.kv.items, self._tokens()
        shape = (part.size, config.padded_rows)
        seen = seen_slots(items, self.item, block, token, first=part.first, part=shape, axis=0)
        if config.tokens_per_row > 1:
            return BlockMask(seen, self.kv.kept_bits(self.item, block, *part))
        slots = part.first + lax.broadcasted_iota(jnp.int32, (part.size, config.lanes), 0)
        return BlockMask(seen, kept_slots(items, self.item, block, slots))

    def _tokens(self) -> jax.Array:
        """int32[1, rows]: which token of the tile a row belongs to."""
        row = lax.broadcasted_iota(jnp.int32, (1, self.config.padded_rows), 1)
        return (row & (self.config.queries * self.config.packing - 1)) >> (self.config.packing.bit_length() - 1)


def _scores_ahead(config: TpuConfig) -> int:
    """Products whose scores are computed ahead: the more, the fewer rows there are for the matrix unit to work on."""
    return max(2, min(7, _ROWS_AHEAD // config.padded_rows))

"""The mask rule over a KV block of a TPU kernel: slots numbered from the block's first, against bounds of the item.

Flow:    scalars of an item + tokens of its rows -> [block_mask] -> who sees which key, and which keys anyone sees
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.tpu_items import ItemTable
from pallas_kernels.ragged_paged_attention.tpu_plan import Field


class BlockMask(NamedTuple):
    """Of one part of a block."""

    seen: jax.Array  # bool[rows, part] the row sees the key
    kept: jax.Array  # bool[part, lanes] some row of the item sees the key


def block_mask(
    items: ItemTable,
    item: jax.Array,
    block: jax.Array,
    token: jax.Array | None,  # int32[rows, 1] of the item's tile; None: all rows are its one token
    *,
    first: int,  # slot of the block
    part: tuple[int, int],  # (rows, slots)
    lanes: int,
) -> BlockMask:
    """Of slots `first ... first + slots` of a block: position less `start`, sink pages apart."""
    sizes, (rows, count) = items.sizes, part
    start = block * sizes.block + items.field(Field.SHIFT, item) * sizes.page_size
    num_sinks = sizes.mask.num_sink_tokens - block * sizes.block
    across = first + lax.broadcasted_iota(jnp.int32, (rows, count), 1)
    down = first + lax.broadcasted_iota(jnp.int32, (count, lanes), 0)
    row_lower, row_upper = _row_bounds(items, item, token)
    lower, upper = items.field(Field.LOWER, item), items.field(Field.UPPER, item)
    return BlockMask(
        _visible(sizes.mask, across, row_lower - start, row_upper - start, num_sinks),
        _visible(sizes.mask, down, lower - start, upper - start, num_sinks),
    )


def _visible(mask: MaskRule, slot: jax.Array, lower: jax.Array, upper: jax.Array, num_sinks: jax.Array) -> jax.Array:
    if mask.sliding_window is None and mask.attention_chunk_size is None:
        return slot <= upper
    inside = slot >= lower
    if mask.num_sink_tokens:
        inside = inside | (slot < num_sinks)
    return inside & (slot <= upper)


def _row_bounds(items: ItemTable, item: jax.Array, token: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(first, last) key that each row sees, sink tokens apart: scalars or int32[rows, 1]."""
    mask = items.sizes.mask
    lower, upper = items.field(Field.LOWER, item), items.field(Field.UPPER, item)
    if token is None:
        return lower, upper
    pos = items.field(Field.POS, item) + token
    row_lower = jnp.zeros_like(pos)
    if mask.sliding_window is not None:
        row_lower = jnp.maximum(row_lower, pos - mask.sliding_window + 1)
    if mask.attention_chunk_size is not None:  # no longer than a chunk, a tile crosses at most one border
        border = items.field(Field.BORDER, item)
        row_lower = jnp.maximum(row_lower, jnp.where(pos >= border, border, border - mask.attention_chunk_size))
    return row_lower, jnp.minimum(pos, upper) if mask.causal else jnp.full_like(pos, upper)

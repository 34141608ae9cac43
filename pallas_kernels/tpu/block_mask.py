"""The mask rule over a KV block of a TPU kernel: slots numbered from the block's first, against bounds of the item.

Flow:    scalars of an item + tokens of its rows -> [block_mask] -> who sees which key, and which keys anyone sees
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mask import MaskRule
from pallas_kernels.tpu.item_plan import Field, ItemSizes
from pallas_kernels.tpu.items import ItemTable


class BlockMask(NamedTuple):
    """The mask of one part of a block."""

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
    """The mask of slots `first ... first + slots` of a block."""
    down = first + lax.broadcasted_iota(jnp.int32, (part[1], lanes), 0)
    return BlockMask(
        seen_slots(items, item, block, token, first=first, part=part), kept_slots(items, item, block, down)
    )


def seen_slots(
    items: ItemTable,
    item: jax.Array,
    block: jax.Array,
    token: jax.Array | None,
    *,
    first: int,
    part: tuple[int, int],
    axis: int = 1,
) -> jax.Array:
    """`BlockMask.seen`; arguments as there. `axis`: of the slots; 0: `part` is (slots, rows), `token` [1, rows]."""
    lower, upper = _row_bounds(items, item, token)
    if token is not None and _rows_share_a_key(items.sizes):
        return _seen_with_sinks(items, item, block, lower, upper, first=first, num_slots=part[axis], axis=axis)
    across = first + lax.broadcasted_iota(jnp.int32, part, axis)
    return _within(items, item, block, across, lower, upper)


def kept_slots(items: ItemTable, item: jax.Array, block: jax.Array, slot: jax.Array) -> jax.Array:
    """Whether any row of the item sees slots `slot` of a block, int32 of any shape."""
    return _within(items, item, block, slot, items.field(Field.LOWER, item), items.field(Field.UPPER, item))


def _within(
    items: ItemTable, item: jax.Array, block: jax.Array, slot: jax.Array, lower: jax.Array, upper: jax.Array
) -> jax.Array:
    """A slot's number is the key's in its sequence's pages less `_start`, sink pages apart."""
    start = _start(items, item, block)
    return _visible(items.sizes.mask, slot, lower - start, upper - start, _num_sinks(items, item, block))


def _start(items: ItemTable, item: jax.Array, block: jax.Array) -> jax.Array:
    return block * items.sizes.block + items.field(Field.SHIFT, item) * items.sizes.page_size


def _num_sinks(items: ItemTable, item: jax.Array, block: jax.Array) -> jax.Array:
    """Slots before this one hold sink tokens."""
    mask = items.sizes.mask
    held = items.field(Field.SINK_TOKENS, item) if mask.sinks_by_sequence else _held(items, item, mask.num_sink_tokens)
    return held - block * items.sizes.block


def _held(items: ItemTable, item: jax.Array, end: Any) -> Any:
    """How many of the first `end` tokens of a sequence the pages hold."""
    share = items.share(item)
    return end if share is None else share.count(end)


def _rows_share_a_key(sizes: ItemSizes) -> bool:
    """Whether the mask has sink tokens, and all rows of an item see the first key of its last row's window."""
    mask = sizes.mask
    is_window = mask.sliding_window is not None and mask.attention_chunk_size is None and mask.causal
    is_whole = sizes.context_size is None
    return mask.has_sink_tokens and is_window and is_whole and sizes.queries <= (mask.sliding_window or 0)


def _seen_with_sinks(
    items: ItemTable,
    item: jax.Array,
    block: jax.Array,
    lower: jax.Array,
    upper: jax.Array,
    *,
    first: int,
    num_slots: int,
    axis: int,
) -> jax.Array:
    """`seen_slots` where `_rows_share_a_key`, by one comparison an element instead of two.

    Sink tokens before the last row's window take the number of that window's first key, which all rows see.
    """
    start = _start(items, item, block)
    shared = items.field(Field.UPPER, item) - (items.sizes.mask.sliding_window or 0) + 1 - start
    num_sinks = _num_sinks(items, item, block)
    slot = first + lax.broadcasted_iota(jnp.int32, (num_slots, 1) if axis == 0 else (1, num_slots), axis)
    slot = jnp.where(slot < jnp.minimum(num_sinks, shared), shared, slot)
    return _is_in_run(slot, lower - start, upper + 1 - start)


def _visible(mask: MaskRule, slot: jax.Array, lower: jax.Array, upper: jax.Array, num_sinks: jax.Array) -> jax.Array:
    if mask.sliding_window is None and mask.attention_chunk_size is None:
        return slot <= upper
    if mask.has_sink_tokens:
        return ~_is_in_run(slot, num_sinks, lower) & (slot <= upper)
    return _is_in_run(slot, lower, upper + 1)


def _is_in_run(slot: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
    """Whether slots are among `first ... end - 1`, by one comparison an element: unsigned, lower ones are huge."""
    return (slot - first).astype(jnp.uint32) < jnp.maximum(end - first, 0).astype(jnp.uint32)


def _row_bounds(items: ItemTable, item: jax.Array, token: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(first, last) key of the pages that each row sees, sink tokens apart: scalars or int32[rows, 1] as `token`."""
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
    row_upper = jnp.minimum(_held(items, item, pos + 1) - 1, upper) if mask.causal else jnp.full_like(pos, upper)
    return _held(items, item, row_lower), row_upper

"""What TPU attention kernels take, and arguments in the form that they take.

Flow:    the op's arguments -> [reason_of_sizes | flat_tables | base2_sinks | lse_with_sinks] -> kernel_tpu
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.key_share import KeyShare
from pallas_kernels.mask import MaskRule
from pallas_kernels.online_softmax import capped_sinks
from pallas_kernels.tpu.base2 import LOG2E
from pallas_kernels.tpu.item_plan import Field

SMALLEST_TILE = 8  # query tokens
_LARGEST_SINK = float(jnp.finfo(jnp.float32).max) / 2
_LARGEST_TABLE_BYTES = 640 << 10  # in scalar memory, of 1 MiB; the rest is for items and the compiler
_ITEMS_AND_TABLES_BYTES = 900 << 10  # both, where there are many items
_TABLE_ALIGNMENT = 1024  # int32s: tiling of a one-dimensional array in HBM


class FlatTables(NamedTuple):
    """Block tables in one line."""

    entries: jax.Array  # int32[S * stride]
    stride: int  # entries from one row to the next
    in_hbm: bool


def reason_of_sizes(page_size: int, mask: MaskRule, share: KeyShare | None = None) -> str | None:
    """What of a call no TPU kernel can do, in words; None if its sizes fit."""
    if page_size & (page_size - 1) or not 8 <= page_size <= 512:
        return f"TPU kernels take page sizes that are powers of two from 8 to 512, got {page_size}"
    chunk = mask.attention_chunk_size
    if chunk is not None and chunk < SMALLEST_TILE:
        return f"TPU kernels take attention chunks of at least {SMALLEST_TILE} tokens, got {chunk}"
    if share is not None and not share.is_even:
        return f"TPU kernels take a power of two as context_size, got {share.size}"
    return None


def flat_tables(block_tables: jax.Array, in_hbm: bool | None, num_tokens: int) -> FlatTables:
    """The tables int32[S, P] flat; `in_hbm` None: in HBM where scalar memory lacks room beside the items.

    Rows in HBM are padded to its tiling.
    """
    if in_hbm is None:
        most_items = min(num_tokens, num_tokens // SMALLEST_TILE + block_tables.shape[0])
        free = _ITEMS_AND_TABLES_BYTES - 4 * Field.SINK_TOKENS * most_items
        in_hbm = block_tables.size * 4 > min(_LARGEST_TABLE_BYTES, free)
    if in_hbm:
        block_tables = jnp.pad(block_tables, [(0, 0), (0, -block_tables.shape[1] % _TABLE_ALIGNMENT)])
    return FlatTables(block_tables.reshape(-1), block_tables.shape[1], in_hbm)


def base2_sinks(sinks: jax.Array) -> jax.Array:
    """float32 times log2(e), so clipped that they stay finite.

    Kernels read the product and never make it: fused with a subtraction it would be unlike the one in m, and
    `exp2(sink - m)` of a large sink infinite.
    """
    return jnp.clip(sinks.astype(jnp.float32), -_LARGEST_SINK, _LARGEST_SINK) * LOG2E


def lse_with_sinks(lse: jax.Array | None, sinks: jax.Array | None) -> jax.Array | None:
    """A kernel's LSE [T, Hq] under `base2_sinks`, at least the sinks themselves in rows that see anything."""
    if lse is None or sinks is None:
        return lse
    return jnp.where(lse == -jnp.inf, lse, jnp.maximum(lse, capped_sinks(sinks)))

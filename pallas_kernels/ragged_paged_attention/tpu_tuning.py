"""Sizes of the TPU kernel's launches: as tuned for the chip, else by formulas.

Flow:    shapes, chip -> [tuned] -> Tuning -> kernel_tpu
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.checks import page_tokens
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.tuning import TunedShape, sizes_for
from pallas_kernels.tpu.item_plan import seen_slots
from pallas_kernels.tpu.limits import SMALLEST_TILE
from pallas_kernels.tpu.mosaic import LANES, chip_name


class Tuning(NamedTuple):
    """Sizes that a tuner may choose; None: by the shapes."""

    queries: int | None = None  # query tokens of a tile, a power of two, at least 8
    decode_block: int | None = None  # slots of a KV block, a power of two, at least 128
    tile_block: int | None = None
    max_unrolled: int = 8  # matrix products of a block that are unrolled
    decode_buffers: int | None = None  # KV blocks in VMEM, a power of two
    tile_buffers: int | None = None


def tuned(q: jax.Array, pages: jax.Array, num_kv_heads: int, mask: MaskRule, num_columns: int) -> Tuning:
    """Sizes of the chip's file for these shapes, no block longer than `num_columns` pages; the rest by the shapes.

    Raises:
        ValueError: the chip's file is broken.
    """
    tuning = Tuning(**sizes_for(chip_name(), TunedShape.of(q, pages, num_kv_heads, mask), Tuning._fields))
    queries = tuning.queries or tile_queries(q.shape[1] // num_kv_heads, mask)
    page_size = page_tokens([pages], num_kv_heads)

    def within(block: int | None, queries: int) -> int | None:
        most = max(LANES, page_size, seen_slots(mask, queries, num_columns, page_size))
        return None if block is None else min(block, most)

    return tuning._replace(decode_block=within(tuning.decode_block, 1), tile_block=within(tuning.tile_block, queries))


def tile_rows(num_tokens: int, num_kv_heads: int) -> int:
    """Rows of queries of one KV head in a tile, for steps of up to `num_tokens` tokens.

    Blocks cost the less a row, the more rows there are, but a short sequence pays for all of its tile. State of
    4,096 rows of all heads takes 8 MiB of VMEM.
    """
    rows = 128 if num_tokens <= 256 else 256 if num_tokens < 2048 else 512
    return max(128, min(rows, 4096 // num_kv_heads))


def tile_queries(group: int, mask: MaskRule, rows: int = 128) -> int:
    """Query tokens of a tile by formula: about so many rows, from 8 tokens to half of that, no longer than a chunk."""
    queries = max(SMALLEST_TILE, min(rows // 2, rows // group))
    if mask.attention_chunk_size is not None:
        queries = min(queries, mask.attention_chunk_size)
    return 1 << (queries.bit_length() - 1)

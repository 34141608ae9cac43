"""kv_write in plain jnp: the specification, and the CPU path.

In place where the caller donates the pages. On CPU that holds for float32, float16, int8 and, with current jax,
bfloat16: XLA for CPU has no scatter of float8 (jax 0.10: of bfloat16) and converts the whole array there and back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.checks import page_tokens
from pallas_kernels.layouts import lane_pieces, tokens_per_row
from pallas_kernels.packed_pages import kv_rows, pages_of_tokens
from pallas_kernels.slab_pages import replaced
from pallas_kernels.stored_numbers import stored


@jax.jit
def kv_write(
    new_k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    new_v: jax.Array,  # [num_tokens, num_kv_heads, head_dim_v]
    pages: tuple[jax.Array, ...],
    slot_mapping: jax.Array,  # int32[num_tokens]
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.kv_write.kv_write`."""
    num_pages, page_size = pages[0].shape[0], page_tokens(pages, new_k.shape[1])
    page = jnp.where(slot_mapping < page_size, num_pages, slot_mapping // page_size)  # out of range: dropped
    offset = slot_mapping % page_size
    if len(pages) == 2:
        rows: tuple[jax.Array, ...] = (stored(new_k, k_scale, pages[0].dtype), stored(new_v, v_scale, pages[1].dtype))
    else:
        rows = (packed_rows(new_k, new_v, pages[0], k_scale, v_scale),)
        if page_size != pages[0].shape[1]:
            return replaced(pages, 0, _with_parts_of_rows(pages[0], rows[0], page, offset))
    for i, x in enumerate(rows):
        pages = replaced(pages, i, pages[i].at[page, offset].set(x, mode="drop"))
    return pages


def packed_rows(
    new_k: jax.Array, new_v: jax.Array, pages: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> jax.Array:
    """New K and V as packed pages hold them, [num_tokens, rows, packing, 128].

    Of tokens that share a row of words [num_tokens, rows, packing / tokens, 128], each token's part.
    """
    k, v = stored(new_k, k_scale, pages.dtype), stored(new_v, v_scale, pages.dtype)
    rows, packing = pages.shape[2:4]
    part, words = packing // tokens_per_row(k.shape[1], packing), rows // lane_pieces(k.shape[2])
    return pages_of_tokens(kv_rows(k, v, words * part)[:, None], 1, part)[:, 0]


def _with_parts_of_rows(
    pages: jax.Array,  # [pages, page_size / tokens, rows, packing, 128]
    parts: jax.Array,  # [num_tokens, rows, packing / tokens, 128]
    page: jax.Array,  # int32[num_tokens]
    offset: jax.Array,  # int32[num_tokens]
) -> jax.Array:
    """The pages with each token's part of its row of words."""
    size = parts.shape[2]
    tokens = pages.shape[3] // size
    place = (offset % tokens * size)[:, None] + jnp.arange(size, dtype=jnp.int32)
    index = (page[:, None, None], offset[:, None, None] // tokens, jnp.arange(parts.shape[1])[:, None], place[:, None])
    return pages.at[index].set(parts, mode="drop")

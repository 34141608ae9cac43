"""sparse_mla_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    the op's arguments -> [sparse_mla_attention] -> gpu_plan -> gpu_attend -> gpu_merge where tokens were split

A launch for all tokens, whether they decode or not: each attends its own rows of both caches in one softmax. Tokens too
few to fill the card are split into pieces. The 64 rows of a tile are all heads, or the largest part that fits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.mla_paged_attention.kernel_gpu import tile_shape
from pallas_kernels.ragged_paged_attention.gpu_merge import merge_pieces
from pallas_kernels.ragged_paged_attention.gpu_plan import MIN_GROUP_ROWS
from pallas_kernels.ragged_paged_attention.gpu_softmax import LOG2_E
from pallas_kernels.sparse_mla_attention.gpu_attend import attend_pieces
from pallas_kernels.sparse_mla_attention.gpu_plan import SparseWork, entry_lists, window_lists
from pallas_kernels.sparse_mla_attention.gpu_rows import CHUNK
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule

_MOST_DIM = 512


class Tuning(NamedTuple):
    """Sizes that change speed, not results."""

    num_blocks: int = mosaic_gpu.NUM_SMS  # thread blocks that fewer tiles are split over


def reason_not_supported(
    q: jax.Array, pages: tuple[jax.Array, ...], compressed_pages: tuple[jax.Array, ...] | None, entries: EntryFormat
) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    dtype, dim = jnp.dtype(q.dtype).name, q.shape[-1]
    if entries != Plain():
        return f"GPU kernels read plain entries, got {entries}"
    if dtype not in ("bfloat16", "float16"):
        return f"GPU kernels take bfloat16 or float16 queries, got {dtype}"
    for array in (*pages, *(compressed_pages or ())):
        if array.ndim != 3:
            return "GPU kernels read latent pages [pages, page_size, dim], got packed ones"
        if array.dtype != q.dtype:
            return f"GPU kernels take pages of {dtype} as the queries, got {jnp.dtype(array.dtype).name}"
    if dim % CHUNK or dim > _MOST_DIM:
        return f"GPU kernels take latents of up to {_MOST_DIM} numbers in steps of {CHUNK}, got {dim}"
    return mosaic_gpu.reason_without_hopper()


def sparse_mla_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],
    schedule: SparseSchedule,
    compressed_pages: tuple[jax.Array, ...] | None,
    compressed_tables: jax.Array | None,  # int32[S, Pc]
    topk_indices: jax.Array | None,  # int32[T, K]
    sinks: jax.Array | None,  # [Hq]
    *,
    sm_scale: float,
    tokens_per_state: int,
    entry_page_size: int,
    tuning: Tuning = Tuning(),  # noqa: B008
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    num_tokens, num_heads, dim = q.shape
    heads = tile_shape(num_heads).heads
    parts = num_heads // heads
    window, entries = window_lists(schedule), None
    if compressed_tables is not None:
        entries = entry_lists(schedule, compressed_tables, topk_indices, tokens_per_state, entry_page_size)
    work = SparseWork.of(window, entries, parts, tuning.num_blocks)
    tiles = _padded(q.reshape(num_tokens * parts, heads, dim), MIN_GROUP_ROWS)
    entry_pages = (compressed_pages or pages)[0]
    none = jnp.full((num_heads,), -jnp.inf, jnp.float32)
    sinks = none if sinks is None else sinks.astype(jnp.float32)
    scale = jnp.full((1,), sm_scale * LOG2_E, jnp.float32)
    if work.units is not None:
        no_sinks = jnp.full((parts, mosaic_gpu.ROWS), -jnp.inf, jnp.float32)
        pieces = attend_pieces(tiles, pages[0], entry_pages, work, no_sinks, scale, jnp.float32)
        return merge_pieces(pieces, work.units, sinks, jnp.ones((parts,), jnp.float32), dim, q.dtype)
    of_tiles = jnp.pad(sinks.reshape(parts, heads), [(0, 0), (0, mosaic_gpu.ROWS - heads)], constant_values=-jnp.inf)
    out, lse = attend_pieces(tiles, pages[0], entry_pages, work, of_tiles, scale, q.dtype)
    return out[:, :heads].reshape(q.shape), lse[:, :heads].reshape(num_tokens, num_heads)


def _padded(tiles: jax.Array, step: int) -> jax.Array:
    """Query tiles [U, rows, D] with rows a multiple of `step`."""
    return jnp.pad(tiles, [(0, 0), (0, -tiles.shape[1] % step), (0, 0)])

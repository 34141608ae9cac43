"""sparse_mla_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    SparseSchedule of the step -> [plan] -> SparseWork
         the op's arguments + SparseWork -> [sparse_mla_attention] -> gpu_attend -> gpu.merge where tokens were split

A launch for all tokens, whether they decode or not: each attends its own rows of both caches in one softmax. Tokens too
few to fill the card are split into pieces. The 64 rows of a tile are all heads, or the largest part that fits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.merge import merge_pieces
from pallas_kernels.gpu.softmax import LOG2_E, as_sinks
from pallas_kernels.gpu.tiles import padded_rows, tile_shape
from pallas_kernels.latent_entries import EntryFormat, LatentFp8
from pallas_kernels.sparse_mla_attention.gpu_attend import Caches, attend_pieces
from pallas_kernels.sparse_mla_attention.gpu_entries import PLAIN_COLUMNS, reason_of_entries, row_format
from pallas_kernels.sparse_mla_attention.gpu_plan import SparseSizes, SparseWork
from pallas_kernels.sparse_mla_attention.gpu_rows import TokenLists
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule
from pallas_kernels.sparse_mla_attention.validate import OP

_MOST_DIM = 512


class Tuning(NamedTuple):
    """Sizes that change speed, not results."""

    num_blocks: int | None = None  # thread blocks that fewer tiles are split over; None: one a multiprocessor


def reason_not_supported(
    q: jax.Array, pages: tuple[jax.Array, ...], compressed_pages: tuple[jax.Array, ...] | None, entries: EntryFormat
) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    dtype, dim = jnp.dtype(q.dtype).name, q.shape[-1]
    if dtype not in ("bfloat16", "float16"):
        return f"GPU kernels take bfloat16 or float16 queries, got {dtype}"
    if isinstance(entries, LatentFp8) and dtype != "bfloat16":
        return f"GPU kernels take bfloat16 queries over entries in fp8, got {dtype}"
    for array in (*pages, *(compressed_pages or ())):
        if array.ndim != 3:
            return "GPU kernels read latent pages [pages, page_size, dim], got packed ones"
        if isinstance(entries, LatentFp8):
            reason = reason_of_entries(entries, array)
            if reason is not None:
                return reason
        elif array.dtype != q.dtype:
            return f"GPU kernels take pages of {dtype} as the queries, got {jnp.dtype(array.dtype).name}"
    if dim % PLAIN_COLUMNS or dim > _MOST_DIM:
        return f"GPU kernels take latents of up to {_MOST_DIM} numbers in steps of {PLAIN_COLUMNS}, got {dim}"
    return mosaic.reason_without_hopper()


def plan(
    schedule: SparseSchedule,
    q: Any,  # [T, Hq, D]; its shape alone
    compressed_tables: jax.Array | None,  # int32[S, Pc]
    *,
    num_picks: int | None,
    tokens_per_state: int,
    entry_page_size: int,
    tuning: Tuning = Tuning(),  # noqa: B008
) -> SparseWork:
    """The work of a step for all layers with these shapes."""
    of_entries: dict[str, Any] = {
        "num_picks": num_picks,
        "tokens_per_state": tokens_per_state,
        "entry_page_size": entry_page_size,
    }
    sizes = _sizes(schedule, q, compressed_tables, tuning, **of_entries)
    return SparseWork.of(schedule, compressed_tables, sizes)


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
    entries: EntryFormat,
    page_size: int,
    entry_page_size: int,
    work: Any = None,  # of `plan`; None: it is made here
    tuning: Tuning = Tuning(),  # noqa: B008
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says.

    Raises:
        ValueError: `work` is none, or was planned for other shapes or another kind of layer.
    """
    del page_size  # that of the pages
    of_entries: dict[str, Any] = {
        "num_picks": None if topk_indices is None else topk_indices.shape[1],
        "tokens_per_state": tokens_per_state,
        "entry_page_size": entry_page_size,
    }
    sizes = _sizes(schedule, q, compressed_tables, tuning, **of_entries)
    if work is None:
        work = SparseWork.of(schedule, compressed_tables, sizes)
    _check_work(work, sizes)
    num_tokens, num_heads, dim = q.shape
    heads = tile_shape(num_heads).heads
    parts = num_heads // heads
    lists, entry_pages = TokenLists(work.rows, work.pieces, work.blocks), pages[0]
    if compressed_pages is not None and compressed_tables is not None:
        entry_pages = compressed_pages[0]
        if topk_indices is not None:
            picked = work.picked_slots(compressed_tables, topk_indices).reshape(-1)
            lists = lists._replace(picked=picked, num_picked=work.num_picked(topk_indices))
    caches = Caches(pages[0], entry_pages, row_format(entries, dim, q.dtype))
    tiles = padded_rows(q.reshape(num_tokens * parts, heads, dim))
    scale = jnp.full((1,), sm_scale * LOG2_E, jnp.float32)
    if work.units is not None:
        pieces = attend_pieces(tiles, caches, lists, as_sinks(None), scale, heads, parts, jnp.float32)
        ones = jnp.ones((1,), jnp.float32)
        return merge_pieces(pieces, work.units, as_sinks(sinks), ones, dim, q.dtype, heads=(parts, num_heads))
    out, lse = attend_pieces(tiles, caches, lists, as_sinks(sinks), scale, heads, parts, q.dtype)
    return out[:, :heads].reshape(q.shape), lse[:, :heads].reshape(num_tokens, num_heads)


def _sizes(
    schedule: SparseSchedule,
    q: Any,
    tables: jax.Array | None,
    tuning: Tuning,
    *,
    num_picks: int | None,
    tokens_per_state: int,
    entry_page_size: int,
) -> SparseSizes:
    """What the plan of a call depends on."""
    num_tokens, num_heads, _ = q.shape
    return SparseSizes(
        num_tokens=num_tokens,
        window=schedule.window_slots.shape[1],
        num_columns=0 if tables is None else tables.shape[1],
        entry_page_size=entry_page_size,
        tokens_per_state=tokens_per_state,
        num_picks=num_picks,
        head_parts=num_heads // tile_shape(num_heads).heads,
        num_blocks=tuning.num_blocks or mosaic.num_sms(),
    )


def _check_work(work: Any, sizes: SparseSizes) -> None:
    """Raises ValueError unless `work` was planned for `sizes`."""
    if not isinstance(work, SparseWork):
        raise ValueError(f"{OP}: expected work to be what plan_work() returns, got {type(work).__name__}")
    if work.sizes != sizes:
        raise ValueError(
            f"{OP}: expected work planned for {sizes}, got one for {work.sizes}; plan it again with this call's shapes "
            "and kind of layer"
        )

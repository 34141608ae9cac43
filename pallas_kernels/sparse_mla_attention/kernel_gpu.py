"""sparse_mla_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    the op's arguments -> [sparse_mla_attention] -> gpu_plan -> gpu_attend -> gpu_merge where tokens were split

A launch for all tokens, whether they decode or not: each attends its own rows of both caches in one softmax. Tokens too
few to fill the card are split into pieces. The 64 rows of a tile are all heads, or the largest part that fits.

Entries in fp8, of 584 bytes, stand where no bulk copy may begin: XLA gathers and decodes what the tokens name, exactly,
since bfloat16 holds all that e4m3 times a power of two can be; the kernel reads that. Per 512 tokens, to bound memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu
from pallas_kernels.latent_entries import EntryFormat, LatentFp8, Plain
from pallas_kernels.latent_pages import EntryCache
from pallas_kernels.mla_paged_attention.kernel_gpu import padded_rows, tile_shape
from pallas_kernels.ragged_paged_attention.gpu_merge import merge_pieces
from pallas_kernels.ragged_paged_attention.gpu_softmax import LOG2_E
from pallas_kernels.ragged_paged_attention.online_softmax import capped_sinks
from pallas_kernels.sparse_mla_attention.gpu_attend import attend_pieces
from pallas_kernels.sparse_mla_attention.gpu_plan import Lists, SparseWork, entry_lists, window_lists
from pallas_kernels.sparse_mla_attention.gpu_rows import CHUNK
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule

_MOST_DIM = 512
_MOST_DECODED = 512  # tokens whose entries are decoded at a time: 335 MB at 640 entries of 512 numbers each


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
    is_fp8 = isinstance(entries, LatentFp8)
    if is_fp8 and dtype != "bfloat16":
        return f"GPU kernels take bfloat16 queries over entries in fp8, got {dtype}"
    for array in (*pages, *(compressed_pages or ())):
        if array.ndim != 3:
            return "GPU kernels read latent pages [pages, page_size, dim], got packed ones"
        if not is_fp8 and array.dtype != q.dtype:
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
    entries: EntryFormat,
    page_size: int,
    entry_page_size: int,
    tuning: Tuning = Tuning(),  # noqa: B008
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    none = jnp.full((q.shape[1],), -jnp.inf, jnp.float32)
    sinks = none if sinks is None else capped_sinks(sinks)
    window, compressed = EntryCache.of(pages, entries, q.shape[-1], page_size), None
    if compressed_pages is not None:
        compressed = EntryCache.of(compressed_pages, entries, q.shape[-1], entry_page_size)
        if topk_indices is None and compressed_tables is not None:
            compressed, compressed_tables = _contiguous(compressed, compressed_tables, q.dtype)

    def attend(
        q: jax.Array, seq: jax.Array, num_before: jax.Array, slots: jax.Array, picks: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        own = schedule._replace(seq=seq, pos=num_before - 1, window_slots=slots)
        lists = [_plain(window_lists(own), window, q.dtype)]
        if compressed is not None and compressed_tables is not None:
            named = entry_lists(own, compressed_tables, picks, tokens_per_state, entry_page_size)
            lists.append(_plain(named, compressed, q.dtype))
        return _attend(q, lists, sinks, sm_scale, tuning)

    tokens = (q, schedule.seq, schedule.pos + 1, schedule.window_slots, topk_indices)
    return attend(*tokens) if entries == Plain() else _in_parts(attend, tokens, _MOST_DECODED)


def _contiguous(cache: EntryCache, tables: jax.Array, dtype: jnp.dtype) -> tuple[EntryCache, jax.Array]:
    """(cache of plain pages, tables) with what the tables name; a plain cache as it is."""
    if cache.entries == Plain():
        return cache, tables
    states = cache.entries.decode(cache.latent.at_pages(tables.reshape(-1)), cache.dim).astype(dtype)
    own = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    return EntryCache.of((states,), Plain(), cache.dim, cache.latent.page_size), own


def _plain(lists: Lists, cache: EntryCache, dtype: jnp.dtype) -> tuple[Lists, jax.Array]:
    """(lists of rows, plain pages that have them): decoded copies, unless the cache is plain."""
    if cache.entries == Plain():
        return lists, cache.latent.array
    rows = cache.read(lists.rows).astype(dtype).reshape(-1, 1, cache.dim)
    number = jnp.arange(lists.rows.size, dtype=jnp.int32).reshape(lists.rows.shape)
    return lists._replace(rows=jnp.where(lists.rows >= 0, number, -1)), rows


def _in_parts(
    attend: Callable[..., tuple[jax.Array, jax.Array]], tokens: tuple[jax.Array | None, ...], size: int
) -> tuple[jax.Array, jax.Array]:
    """`attend` for `size` tokens at a time, one part after the other; tokens of zeros have none before them."""
    num_tokens = jax.tree.leaves(tokens)[0].shape[0]
    if num_tokens <= size:
        return attend(*tokens)

    def parts(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, -num_tokens % size), *[(0, 0)] * (x.ndim - 1)]).reshape(-1, size, *x.shape[1:])

    results = lax.map(lambda part: attend(*part), jax.tree.map(parts, tokens))
    out, lse = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], results)
    return out, lse


def _attend(
    q: jax.Array,
    lists: list[tuple[Lists, jax.Array]],  # of the window, and of the entries where there are any, with their pages
    sinks: jax.Array,  # float32[Hq]
    sm_scale: float,
    tuning: Tuning,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of some tokens over plain pages."""
    num_tokens, num_heads, dim = q.shape
    heads = tile_shape(num_heads).heads
    parts = num_heads // heads
    (window, pages), (entries, entry_pages) = lists[0], lists[1] if len(lists) > 1 else (None, lists[0][1])
    work = SparseWork.of(window, entries, parts, tuning.num_blocks or mosaic_gpu.num_sms())
    tiles = padded_rows(q.reshape(num_tokens * parts, heads, dim))
    scale = jnp.full((1,), sm_scale * LOG2_E, jnp.float32)
    if work.units is not None:
        no_sinks = jnp.full((parts, mosaic_gpu.ROWS), -jnp.inf, jnp.float32)
        pieces = attend_pieces(tiles, pages, entry_pages, work, no_sinks, scale, jnp.float32)
        return merge_pieces(pieces, work.units, sinks, jnp.ones((parts,), jnp.float32), dim, q.dtype)
    of_tiles = jnp.pad(sinks.reshape(parts, heads), [(0, 0), (0, mosaic_gpu.ROWS - heads)], constant_values=-jnp.inf)
    out, lse = attend_pieces(tiles, pages, entry_pages, work, of_tiles, scale, q.dtype)
    return out[:, :heads].reshape(q.shape), lse[:, :heads].reshape(num_tokens, num_heads)

"""sparse_mla_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    SparseSchedule of the step -> [plan] -> SparseWork
         the op's arguments + SparseWork -> [sparse_mla_attention] -> gpu_attend -> gpu_merge where tokens were split

A launch for all tokens, whether they decode or not: each attends its own rows of both caches in one softmax. Tokens too
few to fill the card are split into pieces. The 64 rows of a tile are all heads, or the largest part that fits.

Entries in fp8, of 584 bytes, stand where no bulk copy may begin: XLA gathers and decodes what the tokens name, exactly,
since bfloat16 holds all that e4m3 times a power of two can be; the kernel reads that. Per 512 tokens, to bound memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu
from pallas_kernels.latent_entries import EntryFormat, LatentFp8, Plain
from pallas_kernels.latent_pages import EntryCache
from pallas_kernels.mla_paged_attention.kernel_gpu import padded_rows, tile_shape
from pallas_kernels.ragged_paged_attention.gpu_merge import merge_pieces
from pallas_kernels.ragged_paged_attention.gpu_softmax import LOG2_E, as_sinks
from pallas_kernels.sparse_mla_attention.gpu_attend import TokenLists, attend_pieces
from pallas_kernels.sparse_mla_attention.gpu_plan import SparseSizes, SparseWork, numbered
from pallas_kernels.sparse_mla_attention.gpu_rows import CHUNK
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule
from pallas_kernels.sparse_mla_attention.validate import OP

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


def plan(
    schedule: SparseSchedule,
    q: Any,  # [T, Hq, D]; its shape alone
    compressed_tables: jax.Array | None,  # int32[S, Pc]
    *,
    num_picks: int | None,
    tokens_per_state: int,
    entries: EntryFormat,
    entry_page_size: int,
    tuning: Tuning = Tuning(),  # noqa: B008
) -> SparseWork:
    """The work of a step for all layers with these shapes."""
    options: dict[str, Any] = {
        "tokens_per_state": tokens_per_state,
        "entries": entries,
        "entry_page_size": entry_page_size,
    }
    sizes = _sizes(schedule, q, compressed_tables, num_picks=num_picks, tuning=tuning, **options)
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
    num_picks = None if topk_indices is None else topk_indices.shape[1]
    options: dict[str, Any] = {
        "tokens_per_state": tokens_per_state,
        "entries": entries,
        "entry_page_size": entry_page_size,
    }
    sizes = _sizes(schedule, q, compressed_tables, num_picks=num_picks, tuning=tuning, **options)
    if work is None:
        work = SparseWork.of(schedule, compressed_tables, sizes)
    _check_work(work, sizes)
    layer = _Layer(
        EntryCache.of(pages, entries, q.shape[-1], page_size),
        _compressed(compressed_pages, compressed_tables, sizes, entries, q),
        compressed_tables,
        as_sinks(sinks),
        sm_scale,
    )
    if sizes.num_parts == 1:
        return _attend(layer, q, topk_indices, work.of_part(0))
    missing = sizes.num_parts * sizes.part_tokens - sizes.num_tokens

    def by_part(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(sizes.num_parts, sizes.part_tokens, *x.shape[1:])

    results = lax.map(lambda part: _attend(layer, *part), (*jax.tree.map(by_part, (q, topk_indices)), work))
    out, lse = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: sizes.num_tokens], results)
    return out, lse


def _sizes(
    schedule: SparseSchedule,
    q: Any,
    tables: jax.Array | None,
    *,
    num_picks: int | None,
    tokens_per_state: int,
    entries: EntryFormat,
    entry_page_size: int,
    tuning: Tuning,
) -> SparseSizes:
    """What the plan of a call depends on."""
    num_tokens, num_heads, _ = q.shape
    is_decoded = entries != Plain()
    return SparseSizes(
        num_tokens=num_tokens,
        part_tokens=min(num_tokens, _MOST_DECODED) if is_decoded else num_tokens,
        window=schedule.window_slots.shape[1],
        num_columns=0 if tables is None else tables.shape[1],
        entry_page_size=entry_page_size,
        tokens_per_state=tokens_per_state,
        num_picks=num_picks,
        is_decoded=is_decoded,
        head_parts=num_heads // tile_shape(num_heads).heads,
        num_blocks=tuning.num_blocks or mosaic_gpu.num_sms(),
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


class _Layer(NamedTuple):
    """What the parts of a call share."""

    window: EntryCache
    entries: EntryCache | None
    tables: jax.Array | None  # int32[S, Pc]
    sinks: jax.Array  # float32[1 or Hq], -inf: none
    sm_scale: float


def _compressed(
    pages: tuple[jax.Array, ...] | None,
    tables: jax.Array | None,
    sizes: SparseSizes,
    entries: EntryFormat,
    q: jax.Array,
) -> EntryCache | None:
    """The compressed cache, None if there is none; where its entries are decoded and all seen, plain copies of them."""
    if pages is None or tables is None:
        return None
    cache = EntryCache.of(pages, entries, q.shape[-1], sizes.entry_page_size)
    if sizes.has_picks or not sizes.is_decoded:
        return cache
    states = cache.entries.decode(cache.latent.at_pages(tables.reshape(-1)), cache.dim).astype(q.dtype)
    return EntryCache.of((states,), Plain(), cache.dim, sizes.entry_page_size)


def _attend(layer: _Layer, q: jax.Array, picks: jax.Array | None, work: SparseWork) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the tokens of one part."""
    num_tokens, num_heads, dim = q.shape
    heads = tile_shape(num_heads).heads
    parts = num_heads // heads
    lists, pages, entry_pages = _lists(layer, picks, work, q.dtype)
    tiles = padded_rows(q.reshape(num_tokens * parts, heads, dim))
    scale = jnp.full((1,), layer.sm_scale * LOG2_E, jnp.float32)
    if work.units is not None:
        pieces = attend_pieces(tiles, pages, entry_pages, lists, as_sinks(None), scale, heads, parts, jnp.float32)
        ones = jnp.ones((1,), jnp.float32)
        return merge_pieces(pieces, work.units, layer.sinks, ones, dim, q.dtype, heads=(parts, num_heads))
    out, lse = attend_pieces(tiles, pages, entry_pages, lists, layer.sinks, scale, heads, parts, q.dtype)
    return out[:, :heads].reshape(q.shape), lse[:, :heads].reshape(num_tokens, num_heads)


def _lists(
    layer: _Layer, picks: jax.Array | None, work: SparseWork, dtype: jnp.dtype
) -> tuple[TokenLists, jax.Array, jax.Array]:
    """(lists of one part, plain pages of windows, and of entries): decoded copies of caches in a format."""
    lists = TokenLists(work.rows, work.pieces, work.blocks)
    pages = _rows_at(layer.window, work.slots, dtype)
    if layer.entries is None or layer.tables is None:
        return lists, pages, pages
    if picks is None:
        return lists, pages, layer.entries.latent.array
    slots = work.picked_slots(layer.tables, picks)
    picked = numbered(slots) if work.sizes.is_decoded else slots.reshape(-1)
    lists = lists._replace(picked=picked, num_picked=work.num_picked(picks))
    return lists, pages, _rows_at(layer.entries, slots, dtype)


def _rows_at(cache: EntryCache, slots: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Plain pages of a cache, as they are; of one in a format [n, 1, dim] with the states in all slots."""
    if cache.entries == Plain():
        return cache.latent.array
    return cache.read(slots).astype(dtype).reshape(-1, 1, cache.dim)

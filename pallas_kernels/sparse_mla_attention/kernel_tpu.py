"""sparse_mla_attention for TPU: a pass over the window, one over the compressed entries, sinks once.

Flow:    api -> [kernel_tpu] -> tpu_runs (window) -> state -> tpu_runs or tpu_picks (compressed) -> (out, lse)

Decode sequences go token by token, the others in tiles of `TILE_QUERIES` tokens: two chains of passes, of which either
may be empty. Where the queries name their entries both go token by token, since no two tokens name the same. Items and
window pages come from the step's schedule; only what a layer's indexer picks is arranged per layer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_entries
from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.mosaic import LANES
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.tpu_limits import finite_sinks, lse_with_sinks
from pallas_kernels.sparse_mla_attention import tpu_picks, tpu_runs
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule
from pallas_kernels.sparse_mla_attention.tpu_attention import PassState
from pallas_kernels.sparse_mla_attention.tpu_plan import LARGEST_BLOCK, LaunchConfig, block_pages
from pallas_kernels.token_blocks import MOST_ROWS, TILE_QUERIES, padded_heads, rows_of_heads, rows_of_tables
from pallas_kernels.tpu_entries import EntryReader
from pallas_kernels.tpu_lse import by_head
from pallas_kernels.tpu_states import StatePages

MOST_TOKENS = 16384  # of a call: their items and places take scalar memory
MOST_WINDOW_PAGES = 65536  # of all items, in scalar memory
MOST_COLUMNS = 32768  # of the compressed cache's table: rows of it lie in scalar memory
MOST_HEADS = MOST_ROWS


class Compressed(NamedTuple):
    """The compressed cache, and what the queries see of it."""

    pages: jax.Array
    tables: jax.Array  # int32[S, Pc]
    topk_indices: jax.Array | None  # int32[T, K]; None: all entries
    tokens_per_state: int
    page_size: int


def reason_not_supported(
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    schedule: SparseSchedule,
    compressed_pages: tuple[jax.Array, ...] | None,
    compressed_tables: jax.Array | None,
    topk_indices: jax.Array | None,
    *,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
    entry_page_size: int,
) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    caches = [(pages[0], page_size)]
    counts = [
        ("tokens", q.shape[0], MOST_TOKENS),
        ("query heads", q.shape[1], MOST_HEADS),
        ("pages in all windows", schedule.tiles.pages.size, MOST_WINDOW_PAGES),
    ]
    if compressed_pages is not None and compressed_tables is not None:
        caches.append((compressed_pages[0], entry_page_size))
        counts.append(("columns of compressed_tables", compressed_tables.shape[1], MOST_COLUMNS))
        if topk_indices is not None:
            most = tpu_picks.LARGEST_BUFFER_BYTES // (2 * 4 * compressed_pages[0].shape[-1])
            counts.append(("picked entries", topk_indices.shape[1], most))
    counts += [("states in a page", size, LARGEST_BLOCK) for _, size in caches]
    reasons = [tpu_entries.reason_not_supported(entries, *cache) for cache in caches]
    if tokens_per_state & (tokens_per_state - 1):
        reasons.append(f"TPU kernels take tokens_per_state that are powers of two, got {tokens_per_state}")
    reasons += [f"TPU kernels take up to {most} {what}, got {count}" for what, count, most in counts if count > most]
    return next((reason for reason in reasons if reason is not None), None)


@functools.partial(
    jax.jit,
    static_argnames=(
        "sm_scale", "sliding_window", "tokens_per_state", "entries", "page_size", "entry_page_size", "return_lse"
    ),
)  # fmt: skip
def sparse_mla_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],  # packed: ([pages, rows, packing, lanes],)
    schedule: SparseSchedule,
    compressed_pages: tuple[jax.Array, ...] | None,
    compressed_tables: jax.Array | None,  # int32[S, Pc]
    topk_indices: jax.Array | None,  # int32[T, K]
    sinks: jax.Array | None,  # [Hq]
    *,
    sm_scale: float,
    sliding_window: int,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
    entry_page_size: int,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq] or None) as `AttentionOutput` says."""
    num_tokens, num_heads, dim = q.shape
    is_short = q.dtype == jnp.bfloat16 and pages[0].dtype.itemsize <= 2
    reader = EntryReader(entries, dim, pages[0].dtype.name, "bfloat16" if is_short else "float32")
    compressed = None
    if compressed_pages is not None and compressed_tables is not None:
        compressed = Compressed(compressed_pages[0], compressed_tables, topk_indices, tokens_per_state, entry_page_size)
    layer = _Layer(
        reader, padded_heads(num_heads), sm_scale, sliding_window, page_size, return_lse, pages[0], compressed
    )
    rows = rows_of_heads(reader.spread(q.astype(reader.compute_dtype)))
    num_decode = schedule.decode.blocks.num_items
    decode_tokens = min(num_tokens, schedule.decode.blocks.room)
    decode = layer.attend(rows[: decode_tokens * layer.heads], schedule, 1, sinks)
    tiles = layer.attend(rows, schedule, TILE_QUERIES, sinks)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]

    def by_token(decode: jax.Array, tiles: jax.Array) -> jax.Array:  # [tokens, heads, ...] each
        decode, tiles = (x[:num_tokens] for x in (decode, tiles))
        decode = jnp.pad(decode, [(0, num_tokens - decode.shape[0]), *[(0, 0)] * (decode.ndim - 1)])
        return jnp.where(token[(..., *[None] * (tiles.ndim - 2))] < num_decode, decode, tiles)

    real = (schedule.pos >= 0)[:, None]
    outs = (x["out"].reshape(-1, layer.heads, x["out"].shape[1])[:, :num_heads] for x in (decode, tiles))
    out = jnp.where(real[..., None], reader.gathered(by_token(*outs)), 0).astype(q.dtype)
    if not return_lse:
        return out, None
    lse = by_token(*(by_head(x["lse"], num_heads) for x in (decode, tiles)))
    return out, lse_with_sinks(jnp.where(real, lse, -jnp.inf), sinks)


class _Layer(NamedTuple):
    """What both chains of passes share."""

    reader: EntryReader
    heads: int
    sm_scale: float
    sliding_window: int
    page_size: int
    return_lse: bool
    pages: jax.Array
    compressed: Compressed | None

    def attend(
        self, q: jax.Array, schedule: SparseSchedule, queries: int, sinks: jax.Array | None
    ) -> dict[str, jax.Array]:
        """`out` (and `lse`) of one chain, [T * heads, ...]."""
        items = schedule.decode if queries == 1 else schedule.tiles
        per_row = None if sinks is None else self._per_row(sinks, queries)
        window = self._config(queries, None)
        results = tpu_runs.run_pass(window, items, q, self.pages, None, None, per_row if window.finishes else None)
        if self.compressed is None:
            return results
        state = PassState(*(results[f"{name}_out"] for name in PassState._fields))
        if self.compressed.topk_indices is None:
            config = self._config(queries, self.compressed)
            tables = rows_of_tables(self.compressed.tables)
            return tpu_runs.run_pass(config, items, q, self.compressed.pages, tables, state, per_row)
        return self._attend_picks(q, schedule, queries, state, None if sinks is None else self._per_row(sinks, 1))

    def _attend_picks(
        self, q: jax.Array, schedule: SparseSchedule, queries: int, state: PassState, sinks: jax.Array | None
    ) -> dict[str, jax.Array]:
        compressed = self.compressed
        assert compressed is not None
        assert compressed.topk_indices is not None
        config = self._config(1, compressed)
        cache = config.cache
        none = compressed.tables.shape[1] * cache.rows * cache.places
        num_decode = schedule.decode.blocks.num_items
        if queries == 1:
            num_tokens, span = q.shape[0] // self.heads, jnp.stack([0, num_decode])
        else:
            num_tokens = compressed.topk_indices.shape[0]
            span = jnp.stack([num_decode, jnp.sum(schedule.pos >= 0, dtype=jnp.int32) - num_decode])
        counts = schedule.num_entries(compressed.tokens_per_state)
        indices, counts, seq = (x[:num_tokens] for x in (compressed.topk_indices, counts, schedule.seq))
        picks = tpu_picks.Picks.of(indices, counts, seq, none)
        shifts = tpu_picks.row_shifts(compressed.tables, cache)
        return tpu_picks.pick_pass(config, span, picks, none, q, compressed.pages, shifts, state, sinks)

    def _per_row(self, sinks: jax.Array, queries: int) -> jax.Array:
        """float32[rows of a chunk, 128] natural-log logits, finite as base-2 ones too."""
        sinks = jnp.pad(finite_sinks(sinks), (0, self.heads - sinks.shape[0]))
        sinks = jnp.tile(sinks, queries)[:MOST_ROWS]
        return jnp.broadcast_to(sinks[:, None], (sinks.shape[0], LANES))

    def _config(self, queries: int, compressed: Compressed | None) -> LaunchConfig:
        """Of the pass over the window (`compressed` None) or over the entries."""
        pages, page_size = self.pages, self.page_size
        if compressed is not None:
            pages, page_size = compressed.pages, compressed.page_size
        cache = StatePages(self.reader, page_size, pages.shape[1])
        if compressed is None:
            most = MaskRule(sliding_window=self.sliding_window).max_pages(queries, MOST_WINDOW_PAGES, page_size)
        else:
            most = compressed.tables.shape[1]
        return LaunchConfig(
            cache=cache,
            queries=queries,
            heads=self.heads,
            scale=self.sm_scale,
            tokens_per_state=1 if compressed is None else compressed.tokens_per_state,
            window=self.sliding_window if compressed is None else None,
            block_pages=block_pages(cache, most * page_size),
            continues=compressed is not None,
            finishes=compressed is not None or self.compressed is None,
            return_lse=self.return_lse,
        )

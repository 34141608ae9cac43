"""sparse_mla_attention for TPU: a pass over the window, one over the compressed entries, sinks once.

Flow:    api -> [kernel_tpu] -> tpu_runs (window) -> state -> tpu_runs or tpu_picks (compressed) -> (out, lse)

Decode sequences go token by token, the others in tiles of `TILE_QUERIES` tokens: two chains of passes, of which either
may be empty. Where the queries name their entries both go token by token, since no two tokens name the same. Items and
window pages come from the step's schedule; only what a layer's indexer picks is arranged per layer. Without a window
there is one chain of one pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule
from pallas_kernels.sparse_mla_attention import tpu_picks, tpu_runs
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule, WindowBlocks
from pallas_kernels.sparse_mla_attention.tpu_attention import PassState
from pallas_kernels.sparse_mla_attention.tpu_plan import LARGEST_BLOCK, LaunchConfig, block_pages
from pallas_kernels.tpu.entries import EntryReader, reason_of_entries
from pallas_kernels.tpu.latent_blocks import StatePages
from pallas_kernels.tpu.limits import base2_sinks, lse_with_sinks
from pallas_kernels.tpu.lse import by_head
from pallas_kernels.tpu.mosaic import LANES
from pallas_kernels.tpu.slab_refs import page_names
from pallas_kernels.tpu.token_blocks import TILE_QUERIES, rows_from
from pallas_kernels.tpu.token_specs import MOST_ROWS, padded_heads, rows_of_heads, rows_of_tables

MOST_TOKENS = 16384  # of a call: their items and places take scalar memory
MOST_WINDOW_PAGES = 65536  # of all items, in scalar memory
MOST_COLUMNS = 32768  # of the compressed cache's table: rows of it lie in scalar memory
MOST_HEADS = MOST_ROWS
LARGEST_STATE_BYTES = 256 << 20  # in HBM between two passes


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
            most = tpu_picks.LARGEST_BUFFER_BYTES // (2 * 4 * LANES * compressed_pages[0].shape[2])
            counts.append(("picked entries", topk_indices.shape[1], most))
    counts += [("states in a page", size, LARGEST_BLOCK) for _, size in caches]
    reasons = [reason_of_entries(entries, *cache) for cache in caches]
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
    pages: tuple[jax.Array, ...],  # packed: ([pages, rows, pieces, packing, 128],)
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
    if not sliding_window:
        out, lse = layer.attend_picked(rows, schedule, num_heads, sinks)
        return out.astype(q.dtype), lse
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
    outs = (layer.heads_of(x["out"], num_heads) for x in (decode, tiles))
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

    def attend(self, q: jax.Array, schedule: SparseSchedule, queries: int, sinks: jax.Array | None) -> dict[str, Any]:
        """`out` (and `lse`) of one chain, [T * heads, ...] (and [T, ...]), a chunk of tokens after the other."""
        items = schedule.decode if queries == 1 else schedule.tiles
        num_tokens, size = q.shape[0] // self.heads, self._chunk_tokens(q.shape[1])
        num_decode = schedule.decode.blocks.num_items
        end = num_decode if queries == 1 else jnp.sum(schedule.pos >= 0, dtype=jnp.int32)
        begin = jnp.int32(0) if queries == 1 else num_decode
        picks = self._picks(schedule, num_tokens)
        if num_tokens <= size or self.compressed is None:
            return self._attend_chunk(q, items, queries, picks, begin, end, sinks)
        num_seqs = self.compressed.tables.shape[0]
        room = min(items.blocks.room, size, size // queries + num_seqs)

        def chunk(c: jax.Array) -> dict[str, Any]:
            first = c * size
            return self._attend_chunk(
                rows_from(q, first * self.heads, size * self.heads),
                items.part(first // queries, size // queries, room),
                queries,
                None if picks is None else tpu_picks.Picks(*(rows_from(x, first, size) for x in picks)),
                jnp.clip(begin - first, 0, size),
                jnp.clip(end - first, 0, size),
                sinks,
            )

        results = lax.map(chunk, jnp.arange(cdiv(num_tokens, size), dtype=jnp.int32))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    def attend_picked(
        self, q: jax.Array, schedule: SparseSchedule, num_heads: int, sinks: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """(out, lse or None) as the op's, of tokens that see what they name and nothing else; q [T * heads, lanes]."""
        num_tokens = schedule.pos.shape[0]
        picks = self._picks(schedule, num_tokens)
        assert picks is not None  # the op's checks come first
        sees = ((schedule.pos >= 0) & (picks.num_groups > 0))[:, None]
        span = jnp.stack([jnp.int32(0), jnp.sum(schedule.pos >= 0, dtype=jnp.int32)])
        result = self._pick_pass(span, picks, q, None, sinks)
        out = self.reader.gathered(self.heads_of(result["out"], num_heads))[:num_tokens]
        out = jnp.where(sees[..., None], out, 0)
        if not self.return_lse:
            return out, None
        lse = by_head(result["lse"], num_heads)[:num_tokens]
        return out, lse_with_sinks(jnp.where(sees, lse, -jnp.inf), sinks)

    def heads_of(self, out: jax.Array, num_heads: int) -> jax.Array:  # [T * heads, lanes]
        """[T, num_heads, lanes]."""
        return out.reshape(-1, self.heads, out.shape[1])[:, :num_heads]

    def _chunk_tokens(self, lanes: int) -> int:
        """Tokens whose state between two passes takes at most `LARGEST_STATE_BYTES`."""
        most = LARGEST_STATE_BYTES // (4 * self.heads * (lanes + 2 * LANES))
        return max(TILE_QUERIES, most // TILE_QUERIES * TILE_QUERIES)

    def _attend_chunk(
        self,
        q: jax.Array,  # [T * heads, lanes]
        items: WindowBlocks,
        queries: int,
        picks: tpu_picks.Picks | None,
        begin: jax.Array,  # int32[] first token of the chain
        end: jax.Array,
        sinks: jax.Array | None,
    ) -> dict[str, Any]:
        per_row = None if sinks is None else self._per_row(sinks, queries)
        window = self._config(queries, None)
        results = tpu_runs.run_pass(window, items, q, self.pages, None, None, per_row if window.finishes else None)
        compressed = self.compressed
        if compressed is None:
            return results
        if picks is None:
            config = self._config(queries, compressed)
            tables = rows_of_tables(page_names(compressed.pages, compressed.tables))
            return tpu_runs.run_pass(config, items, q, compressed.pages, tables, results["after"], per_row)
        span = jnp.stack([begin, jnp.maximum(end - begin, 0)])
        return self._pick_pass(span, picks, q, results["after"], sinks)

    def _pick_pass(
        self,
        span: jax.Array,  # int32[2] first token, number of tokens
        picks: tpu_picks.Picks,
        q: jax.Array,  # [T * heads, lanes]
        state: PassState | None,
        sinks: jax.Array | None,
    ) -> dict[str, Any]:
        """Over the entries that tokens name."""
        compressed = self.compressed
        assert compressed is not None  # there are picks
        config = self._config(1, compressed)
        shifts = tpu_picks.row_shifts(compressed.tables, compressed.pages)
        per_row = None if sinks is None else self._per_row(sinks, 1)
        none = self._none(compressed, config)
        return tpu_picks.pick_pass(config, span, picks, none, q, compressed.pages, shifts, state, per_row)

    def _picks(self, schedule: SparseSchedule, num_tokens: int) -> tpu_picks.Picks | None:
        """What the first tokens name; None where all entries are seen, or none."""
        compressed = self.compressed
        if compressed is None or compressed.topk_indices is None:
            return None
        none = self._none(compressed, self._config(1, compressed))
        counts = schedule.num_entries(compressed.tokens_per_state)
        indices, counts, seq = (x[:num_tokens] for x in (compressed.topk_indices, counts, schedule.seq))
        return tpu_picks.Picks.of(indices, counts, seq, none)

    @staticmethod
    def _none(compressed: Compressed, config: LaunchConfig) -> int:
        """What names no entry: one past the last column of the table."""
        return compressed.tables.shape[1] * config.cache.rows * config.cache.places

    def _per_row(self, sinks: jax.Array, queries: int) -> jax.Array:
        """float32[rows of a chunk, 128] natural-log logits, finite as base-2 ones too."""
        sinks = jnp.pad(base2_sinks(sinks), (0, self.heads - sinks.shape[0]))
        sinks = jnp.tile(sinks, queries)[:MOST_ROWS]
        return jnp.broadcast_to(sinks[:, None], (sinks.shape[0], LANES))

    def _config(self, queries: int, compressed: Compressed | None) -> LaunchConfig:
        """The config of the pass over the window (`compressed` None) or over the entries."""
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
            finishes=compressed is not None or self.compressed is None,
            return_lse=self.return_lse,
        )

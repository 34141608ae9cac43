"""indexer_topk for TPU: scores of a sequence's entries as its keys stream by, then the best of each token.

Flow:    queries + weights + pages of keys -> scores in VMEM -> [Selection] -> int32[T, K]

Grid: a step per item and one more (`TokenBlocks`): tokens of decode sequences one by one, of others in tiles. Step w
starts the first blocks of item w and works on item w - 1. Blocks of 128 rows of keys are loaded once for all tokens of
a tile; their scores stay in VMEM, 4 bytes an entry and token, and none goes to HBM. Flops: 2 * heads * dim an entry.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_topk.tpu_select import GROUP, LEAST, Selection, sort_keys
from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.layouts import cdiv
from pallas_kernels.schedule import Batch
from pallas_kernels.token_places import TokenPlaces
from pallas_kernels.tpu.base2 import dot
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.entries import EntryReader, reason_of_entries
from pallas_kernels.tpu.latent_blocks import Run, StateBlocks, StatePages, log2
from pallas_kernels.tpu.mosaic import LANES, Ref, load_row
from pallas_kernels.tpu.slab_refs import page_names
from pallas_kernels.tpu.token_blocks import TILE_QUERIES, Field, TokenBlocks, both_kinds
from pallas_kernels.tpu.token_specs import (
    MOST_ROWS,
    padded_heads,
    row_specs,
    rows_of_heads,
    rows_of_tables,
    table_spec,
    token_spec,
)

BLOCK_ROWS = LANES  # rows of keys: the scores of a place fill a row
_BUFFERS = 8  # of so many rows: blocks are small, and HBM answers after about a microsecond
MOST_TOKENS = 16384  # of a call: their items take scalar memory
MOST_PICKS = 2048
_LARGEST_SCORES_BYTES = 24 << 20  # of VMEM
_VMEM_LIMIT_BYTES = 48 << 20


def reason_not_supported(
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,
    *,
    topk: int,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    reason = reason_of_entries(entries, pages[0], page_size)
    if reason is not None:
        return reason
    if tokens_per_state & (tokens_per_state - 1):
        return f"TPU kernels take tokens_per_state that are powers of two, got {tokens_per_state}"
    cache = StatePages(_reader(q, pages, entries), page_size, pages[0].shape[1])
    num_bytes = 4 * TILE_QUERIES * LANES * _score_rows(cache, block_tables.shape[1])
    counts = (
        ("tokens", q.shape[0], MOST_TOKENS),
        ("heads", q.shape[1], MOST_ROWS),
        ("picked entries", topk, MOST_PICKS),
        ("rows in a page", cache.rows, BLOCK_ROWS),
        ("bytes of scores of a tile", num_bytes, _LARGEST_SCORES_BYTES),
    )
    return next((f"TPU kernels take up to {most} {what}, got {n}" for what, n, most in counts if n > most), None)


@functools.partial(jax.jit, static_argnames=("topk", "tokens_per_state", "entries", "page_size"))
def indexer_topk(
    q: jax.Array,  # [T, Hi, Di]
    weights: jax.Array,  # [T, Hi]
    pages: tuple[jax.Array, ...],  # packed: ([pages, rows, pieces, packing, 128],)
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    topk: int,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
) -> jax.Array:
    """int32[T, topk] as `pallas_kernels.indexer_topk.indexer_topk`."""
    num_tokens = q.shape[0]
    reader = _reader(q, pages, entries)
    cache = StatePages(reader, page_size, pages[0].shape[1])
    config = _Config(cache, 1, padded_heads(q.shape[1]), topk, tokens_per_state)
    rows = rows_of_heads(reader.spread(q.astype(reader.compute_dtype)))
    shares = rows_of_heads(jnp.broadcast_to(weights.astype(jnp.float32)[..., None], (*weights.shape, LANES)))
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    decode_blocks, tile_blocks = both_kinds(batch, distribution, num_tokens)
    num_decode = min(num_tokens, seq_lens.shape[0])
    own = num_decode * config.heads
    decode = _launch(config, decode_blocks, rows[:own], shares[:own], pages[0], block_tables)
    tiled = _launch(config.of_tiles(), tile_blocks, rows, shares, pages[0], block_tables)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    first = jnp.pad(decode[:num_decode, 0], [(0, num_tokens - num_decode), (0, 0)])
    best = jnp.where(token < decode_blocks.num_items, first, tiled[:num_tokens, 0])[:, :topk]
    return jnp.where(TokenPlaces.of_batch(batch, num_tokens).pos[:, None] >= 0, best, -1)


def _reader(q: jax.Array, pages: tuple[jax.Array, ...], entries: EntryFormat) -> EntryReader:
    is_short = q.dtype == jnp.bfloat16 and pages[0].dtype.itemsize <= 2
    return EntryReader(entries, q.shape[2], pages[0].dtype.name, "bfloat16" if is_short else "float32")


def _score_rows(cache: StatePages, num_columns: int) -> int:
    """Rows of scores of a token: whole groups."""
    num_blocks = cdiv(num_columns * cache.rows, BLOCK_ROWS)
    return cdiv(num_blocks * cache.places, GROUP) * GROUP


@dataclass(frozen=True)
class _Config:
    """Static sizes of one launch."""

    cache: StatePages
    queries: int
    heads: int  # padded
    topk: int
    tokens_per_state: int

    def of_tiles(self) -> _Config:
        """For tiles of several tokens."""
        return _Config(self.cache, TILE_QUERIES, self.heads, self.topk, self.tokens_per_state)

    @property
    def num_rows(self) -> int:
        """Rows of a block of tokens."""
        return self.queries * self.heads

    @property
    def chunk(self) -> int:
        """Rows of a matrix product: whole tokens."""
        return min(self.num_rows, MOST_ROWS)


class _Refs(NamedTuple):
    """References of a step; the blocks are those of the item before."""

    items: Ref  # SMEM int32[fields * room] of `TokenBlocks`
    table: Ref  # SMEM int32[1, 1, n] pages of the item's sequence
    next_table: Ref  # SMEM int32[1, 1, n] of the next item's
    q: Ref  # [queries * heads, lanes]
    weights: Ref  # float32[queries * heads, 128]
    pages: Ref  # HBM [pages, rows, pieces, packing, 128]
    out: Ref  # int32[queries, 1, K padded]
    buffer: Ref  # [buffers, 128, pieces, packing, 128] rows of keys
    vectors: Ref  # [places, 128, lanes] keys
    keys: Ref  # int32[queries, rows, 128] sort keys of the scores
    picked_keys: Ref  # int32[K padded, 128]
    picked_entries: Ref  # int32[K padded, 128]
    num_before: Ref  # SMEM int32[1]
    arrived: Ref  # DMA semaphores, one a buffer


def _launch(
    config: _Config, items: TokenBlocks, q: jax.Array, weights: jax.Array, pages: jax.Array, block_tables: jax.Array
) -> jax.Array:
    """int32[T, 1, K] of the items' tokens; the rest is undefined."""
    cache, width = config.cache, cdiv(config.topk, LANES) * LANES
    tables, rows = rows_of_tables(page_names(pages, block_tables)), row_specs(items, config.num_rows)
    by_token = token_spec(items, config.queries, width)
    results = call(
        lambda refs: _Step(config, items.room, refs).run(),
        _Refs,
        name=f"indexer_q{config.queries}_h{config.heads}_k{config.topk}_p{cache.page_size}",
        grid=items.num_items + 1,
        scalars={"items": items.table},
        inputs={
            "table": Operand(tables, table_spec(items, tables.shape[2], 0)),
            "next_table": Operand(tables, table_spec(items, tables.shape[2], 1)),
            "q": Operand(q, rows(q.shape[1])),
            "weights": Operand(weights, rows(LANES)),
            "pages": Operand(pages, IN_HBM),
        },
        outputs={"out": Operand(jax.ShapeDtypeStruct((q.shape[0] // config.heads, 1, width), jnp.int32), by_token)},
        scratch={
            "buffer": pltpu.VMEM((_BUFFERS, BLOCK_ROWS, *pages.shape[2:]), pages.dtype),
            "vectors": pltpu.VMEM((cache.places, BLOCK_ROWS, q.shape[1]), q.dtype),
            "keys": pltpu.VMEM((config.queries, _score_rows(cache, block_tables.shape[1]), LANES), jnp.int32),
            "picked_keys": pltpu.VMEM((width, LANES), jnp.int32),
            "picked_entries": pltpu.VMEM((width, LANES), jnp.int32),
            "num_before": pltpu.SMEM((1,), jnp.int32),
            "arrived": pltpu.SemaphoreType.DMA((_BUFFERS,)),
        },
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )
    return results["out"]


@dataclass(frozen=True)
class _Step:
    """One step of the grid."""

    config: _Config
    room: int
    refs: _Refs

    def run(self) -> None:
        """Picks for the tokens of the item before; the first blocks of this step's item get under way."""
        step, last = pl.program_id(0), pl.num_programs(0) - 1
        pl.when(step == 0)(lambda: self._blocks.begin(lambda: self._run_of(0, is_next=True), last > 0))
        pl.when(step > 0)(lambda: self._pick(step - 1, step < last))

    @property
    def _blocks(self) -> StateBlocks:
        refs, cache = self.refs, self.config.cache
        return StateBlocks(cache, BLOCK_ROWS // cache.rows, refs.pages, refs.buffer, refs.arrived, refs.num_before)

    def _field(self, field: Field, item: jax.Array | int) -> jax.Array:
        return self.refs.items[field * self.room + item]

    def _num_entries(self, item: jax.Array | int, token: jax.Array) -> jax.Array:
        """Entries that a token of the item's block sees."""
        return (self._field(Field.POS, item) + token + 1) >> log2(self.config.tokens_per_state)

    def _run_of(self, item: jax.Array | int, *, is_next: bool) -> Run:
        table = self.refs.next_table if is_next else self.refs.table
        upper = self._num_entries(item, self._field(Field.END, item) - 1) - 1
        return Run(jnp.int32(0), upper, self.config.cache.page_size, lambda j: table[0, 0, j])

    def _pick(self, item: jax.Array, has_next: jax.Array) -> None:
        run, blocks, places = self._run_of(item, is_next=False), self._blocks, self.config.cache.places
        begin, end = self._field(Field.BEGIN, item), self._field(Field.END, item)
        num_rows = ((run.num_pages + blocks.block_pages - 1) >> log2(blocks.block_pages)) * places
        num_groups = (num_rows + GROUP - 1) >> log2(GROUP)

        def clear_last(token: jax.Array, carry: None) -> None:
            last = pl.ds(pl.multiple_of(jnp.maximum(num_groups - 1, 0) * GROUP, GROUP), GROUP)
            self.refs.keys[token, last, :] = jnp.full((GROUP, LANES), LEAST, jnp.int32)
            return carry

        lax.fori_loop(begin, end, clear_last, None)
        blocks.walk(run, lambda: self._run_of(item + 1, is_next=True), has_next, lambda b, s: self._score(item, b, s))

        def one(token: jax.Array, carry: None) -> None:
            self._select(token, num_groups, self._num_entries(item, token))
            return carry

        lax.fori_loop(begin, end, one, None)

    def _score(self, item: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Keys of a block's entries for every token of the tile."""
        config, refs = self.config, self.refs
        cache, size = config.cache, config.chunk
        reader = cache.reader
        words = [load_row(refs.buffer, (slot,), 0, BLOCK_ROWS, piece) for piece in range(reader.num_pieces)]
        for place in range(cache.places):
            for piece, x in enumerate(reader.vectors(words, place, None)):
                refs.vectors[place, :, pl.ds(piece * LANES, LANES)] = x
        scales = reader.index_scales(words)
        first = (block * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)) * cache.places

        def chunk(c: jax.Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(c * size, size), size)
            for place in range(cache.places):
                s = dot(refs.q[rows], refs.vectors[place], (((1,), (1,)), ((), ())))
                s = jnp.maximum(s, 0.0) * refs.weights[rows]
                for n in range(size // config.heads):
                    score = jnp.sum(s[n * config.heads : (n + 1) * config.heads], axis=0, keepdims=True)
                    score = score if scales is None else score * scales[place]
                    token = c * (size // config.heads) + n
                    seen = first + place < self._num_entries(item, token)
                    at = pl.ds(block * cache.places + place, 1)
                    refs.keys[token, at, :] = jnp.where(seen, sort_keys(score), LEAST)
            return carry

        lax.fori_loop(0, config.num_rows // size, chunk, None)

    def _select(self, token: jax.Array, num_groups: jax.Array, num_seen: jax.Array) -> None:
        refs, config = self.refs, self.config
        selection = Selection(
            refs.keys.at[token],
            num_groups,
            num_seen,
            config.topk,
            config.cache.places,
            refs.picked_keys,
            refs.picked_entries,
        )

        def write(n: int, x: jax.Array) -> None:
            refs.out[token, :, pl.ds(n * LANES, LANES)] = x

        selection.write(write)

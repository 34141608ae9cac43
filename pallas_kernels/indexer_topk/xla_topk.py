"""indexer_topk in plain XLA, vectorised: what GPUs run.

Flow:    api -> [indexer_topk] -> query tiles -> keys of many pages at a time -> scores -> the best of each token

Tokens of one sequence share the keys that they meet. Two walks share a step, as those of `xla.walks` do: over the
sequences of few queries, and over query tiles of the others. All scores of some tiles stand side by side before the
best are taken, once: float32, at most `Limits.scores_bytes`. Keys cross memory three times (read, written, read by the
products), logits twice. Products are in the dtype of the queries where that holds the numbers of the keys; the scale of
an fp8 key is a factor of its score.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.layouts import cdiv
from pallas_kernels.lazy import lazy
from pallas_kernels.mask import MaskRule
from pallas_kernels.packed_pages import states_of_pages
from pallas_kernels.schedule import Batch, QueryTile, few_queries, query_tiles
from pallas_kernels.varying import vary_like
from pallas_kernels.xla.walks import product_dtype

if TYPE_CHECKING:
    from pallas_kernels.indexer_topk import triton_scores
else:
    triton_scores = lazy("pallas_kernels.indexer_topk.triton_scores")

_TILE_QUERIES = 64


@dataclass(frozen=True)
class Limits:
    """What is done at a time, at most; but for one tile and one page."""

    trip_bytes: int = 64 << 20  # gathered keys and their logits
    scores_bytes: int = 64 << 20
    least_entries: int = 512  # of a trip: queries are read again in each


class Keys(NamedTuple):
    """Index keys behind block tables."""

    latent: LatentPages
    block_tables: jax.Array  # int32[S, P]
    entries: EntryFormat
    dim: int

    def of_pages(self, seq: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(numbers [C, n * page_size, dim], their scales or None) of columns int32[n] of sequences int32[C]."""
        columns = jnp.minimum(column, self.block_tables.shape[1] - 1)
        ids = self.block_tables[seq[:, None], columns[None]]
        rows = self.latent.at_pages(ids.reshape(-1))
        return self.entries.factored(rows.reshape(seq.shape[0], -1, rows.shape[-1]), self.dim)


@dataclass(frozen=True)
class Sizes:
    """How much is done at a time."""

    queries: int  # of a query tile
    num_tiles: int  # that are walked together
    trip_pages: int  # of each of them
    page_size: int  # entries
    num_columns: int  # of the block tables

    @classmethod
    def of(cls, q: jax.Array, queries: int, room: int, keys: Keys, limits: Limits) -> Sizes:
        """For tiles of `queries`, of which a step has at most `room`."""
        num_heads, dim = q.shape[1:]
        page_size, num_columns = keys.latent.page_size, keys.block_tables.shape[1]
        page_bytes = page_size * (2 * dim * q.dtype.itemsize + 4 * queries * num_heads)
        scores_bytes = 4 * queries * num_columns * page_size
        least_pages = min(num_columns, cdiv(limits.least_entries, page_size))
        most_tiles = min(limits.trip_bytes // (least_pages * page_bytes), limits.scores_bytes // scores_bytes)
        num_tiles = min(room, max(1, most_tiles))
        trip_pages = min(num_columns, max(1, limits.trip_bytes // (num_tiles * page_bytes)))
        return cls(queries, num_tiles, trip_pages, page_size, num_columns)

    @classmethod
    def of_scores(cls, q: jax.Array, queries: int, room: int, keys: Keys, limits: Limits) -> Sizes:
        """As `of`, where logits stay out of memory: all entries are one trip."""
        page_size, num_columns = keys.latent.page_size, keys.block_tables.shape[1]
        num_tiles = min(room, max(1, limits.scores_bytes // (4 * queries * num_columns * page_size)))
        return cls(queries, num_tiles, num_columns, page_size, num_columns)

    @property
    def trip_entries(self) -> int:
        """Entries of a tile that a trip scores."""
        return self.trip_pages * self.page_size

    @property
    def num_entries(self) -> int:
        """Places for the scores of a query: whole trips."""
        return cdiv(self.num_columns, self.trip_pages) * self.trip_entries


@functools.partial(jax.jit, static_argnames=("topk", "tokens_per_state", "entries", "page_size", "limits", "by_triton"))
def indexer_topk(
    q: jax.Array,  # [T, Hi, Di]
    weights: jax.Array,  # [T, Hi]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    topk: int,
    tokens_per_state: int,
    entries: EntryFormat,
    page_size: int,
    limits: Limits = Limits(),
    by_triton: bool = False,  # scores by a kernel in Triton
) -> jax.Array:
    """int32[T, topk] as `pallas_kernels.indexer_topk.indexer_topk`."""
    keys = Keys(LatentPages(pages[0], page_size, entries.width(q.shape[-1])), block_tables, entries, q.shape[-1])
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    picks = jnp.full((q.shape[0], topk), -1, jnp.int32)
    picks = vary_like(picks, q, weights, *pages, *batch, block_tables)
    for walk in plan_walks(q, keys, batch, tokens_per_state, limits, by_triton):
        with jax.named_scope(walk.name):
            picks = _walked(picks, q, weights, keys, walk, tokens_per_state, by_triton)
    return picks


class Walk(NamedTuple):
    """Query tiles of one size, in chunks of `sizes.num_tiles`."""

    name: str
    tiles: QueryTile  # int32[whole chunks] each
    num_tiles: jax.Array  # int32[] that there are; the others have no queries
    sizes: Sizes


def plan_walks(
    q: jax.Array, keys: Keys, batch: Batch, tokens_per_state: int, limits: Limits, by_triton: bool = False
) -> list[Walk]:
    """The walks of a step: over sequences of few queries, and over query tiles of the others if it can have any."""
    num_tokens, num_seqs = q.shape[0], keys.block_tables.shape[0]
    few = few_queries(num_tokens, num_seqs, _TILE_QUERIES)
    is_short = batch.q_lens <= few
    parts = [("short", few, is_short, num_seqs)]
    if num_tokens > few:
        most = min(num_tokens, _TILE_QUERIES)
        parts.append(("long", most, ~is_short, min(num_tokens, num_tokens // most + num_seqs)))
    walks = []
    for name, queries, is_own, room in parts:
        own = batch._replace(q_lens=jnp.where(is_own, batch.q_lens, 0))
        sizes = (Sizes.of_scores if by_triton else Sizes.of)(q, queries, room, keys, limits)
        room = cdiv(room, sizes.num_tiles) * sizes.num_tiles
        column_tokens = sizes.page_size * tokens_per_state
        tiles, count = query_tiles(own, MaskRule(), room=room, queries=queries, page_size=column_tokens)
        walks.append(Walk(name, tiles, count, sizes))
    return walks


def num_trips(walk: Walk, tokens_per_state: int) -> tuple[int, int]:
    """(chunks, trips over keys of all of them) of a walk whose lengths are known."""
    size = walk.sizes.num_tiles
    counts = (walk.tiles.last_pos + 1) // tokens_per_state
    chunks = -(-int(walk.num_tiles) // size)
    most = [int(jnp.max(counts[first : first + size])) for first in range(0, chunks * size, size)]
    return chunks, sum(-(-count // walk.sizes.trip_entries) for count in most)


def _walked(
    picks: jax.Array,
    q: jax.Array,
    weights: jax.Array,
    keys: Keys,
    walk: Walk,
    tokens_per_state: int,
    by_triton: bool,
) -> jax.Array:
    """`picks` with those of the walk's tokens."""
    sizes = walk.sizes

    def chunk(i: jax.Array, picks: jax.Array) -> jax.Array:
        own = QueryTile(*(lax.dynamic_slice_in_dim(x, i * sizes.num_tiles, sizes.num_tiles) for x in walk.tiles))
        place = jnp.arange(sizes.queries, dtype=jnp.int32)
        pos = own.first_pos[:, None] + place
        is_real = pos <= own.last_pos[:, None]
        token = jnp.where(is_real, own.token[:, None] + place, q.shape[0])
        counts = jnp.where(is_real, (pos + 1) // tokens_per_state, 0)
        if by_triton:
            states, size = states_of_pages(keys.latent.array), keys.latent.page_size
            behind = triton_scores.Entries(states, keys.block_tables, size, keys.entries)
            heads = q.astype(product_dtype(q.dtype, _number_dtype(keys)))
            scores = triton_scores.score_tiles(heads, weights, behind, own.seq, own.token, counts)
        else:
            own_q, own_weights = (x.at[token].get(mode="clip") for x in (q, weights))
            scores = _scores(own_q, own_weights, keys, own.seq, counts, sizes)
        return picks.at[token].set(_best(scores, picks.shape[1]), mode="drop")

    with jax.named_scope("chunks"):
        return lax.fori_loop(0, -(-walk.num_tiles // sizes.num_tiles), chunk, picks)


def _number_dtype(keys: Keys) -> jnp.dtype:
    """The dtype of a key's numbers before its scale."""
    return keys.latent.array.dtype if keys.entries == Plain() else jnp.dtype(jnp.float8_e4m3fn)


def _scores(
    q: jax.Array,  # [C, n, Hi, Di]
    weights: jax.Array,  # [C, n, Hi]
    keys: Keys,
    seq: jax.Array,  # int32[C]
    counts: jax.Array,  # int32[C, n] entries of each query
    sizes: Sizes,
) -> jax.Array:
    """float32[C, n, sizes.num_entries], -inf where a query has no such entry."""
    size = sizes.trip_entries

    def trip(i: jax.Array, scores: jax.Array) -> jax.Array:
        first = i * size
        column = i * sizes.trip_pages + jnp.arange(sizes.trip_pages, dtype=jnp.int32)
        numbers, scale = keys.of_pages(seq, column)
        dtype = product_dtype(q.dtype, numbers.dtype)
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        logits = jnp.einsum(
            "cnhd,ced->cnhe",
            q.astype(dtype),
            numbers.astype(dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        score = jnp.sum(weights[..., None].astype(jnp.float32) * jnp.maximum(logits, 0.0), axis=2)
        if scale is not None:
            score = score * scale[:, None]
        entry = first + jnp.arange(size, dtype=jnp.int32)
        score = jnp.where(entry < counts[..., None], score, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, score, first, axis=2)

    scores = jnp.full((*counts.shape, sizes.num_entries), -jnp.inf, jnp.float32)
    scores = vary_like(scores, q, weights, seq, counts, keys.latent.array, keys.block_tables)
    with jax.named_scope("trips"):
        return lax.fori_loop(0, -(-jnp.max(counts) // size), trip, scores)


def _best(scores: jax.Array, topk: int) -> jax.Array:
    """int32[..., topk] places of the highest float32[..., E] scores, highest first; -1 after the last above -inf."""
    best, place = lax.top_k(scores, min(topk, scores.shape[-1]))
    picks = jnp.where(best > -jnp.inf, place, -1).astype(jnp.int32)
    return jnp.pad(picks, [*[(0, 0)] * (picks.ndim - 1), (0, topk - picks.shape[-1])], constant_values=-1)

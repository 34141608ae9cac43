"""Which queries are attended together, which pages they see, and how many KV tiles that makes.

Flow:    lengths of the step + mask rule -> [make_schedule] -> Schedule -> [Schedule.item] -> one WorkItem per trip

A *query tile* is up to `queries` successive query tokens of one sequence. It sees the pages of its `PageRun`, read
`tile_pages` at a time: one *work item* each. The schedule depends on the step, the mask and the shapes alone, so that
all layers of a kind share one computation of it. Tiles of sequences of few queries, each of which is one tile, are kept
apart from the others: part 0 and 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mask import MaskRule, PageRun


class Batch(NamedTuple):
    """The sequences of a step."""

    seq_lens: jax.Array  # int32[S]
    starts: jax.Array  # int32[S] first query token
    q_lens: jax.Array  # int32[S] query tokens, 0 for padding rows
    sink_tokens: jax.Array | None = None  # int32[S] of a mask with `sinks_by_sequence`

    @classmethod
    def of_step(
        cls,
        seq_lens: jax.Array,
        query_start_loc: jax.Array,
        distribution: jax.Array,
        sink_tokens: jax.Array | None = None,
    ) -> Batch:
        """From int32[S] `seq_lens`, int32[S + 1] `query_start_loc`, int32[3] `distribution`, int32[S] `sink_tokens`."""
        real = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < distribution[2]
        return cls(seq_lens, query_start_loc[:-1], jnp.where(real, jnp.diff(query_start_loc), 0), sink_tokens)

    def seeing(self, mask: MaskRule) -> Batch:
        """Without the query tokens that see no key: those before position 0, or all where there are no keys."""
        blind = jnp.clip(self.q_lens - self.seq_lens, 0, self.q_lens)
        if mask.sees_all:
            blind = jnp.where(self.seq_lens > 0, 0, blind)
        return self._replace(starts=self.starts + blind, q_lens=self.q_lens - blind)

    def positions(self, mask: MaskRule) -> tuple[jax.Array, jax.Array]:
        """int32[S] each, position of the first and of the last query token of a sequence; a last one of -1: none.

        Where every query sees every key a sequence may have more queries than keys; they then stand at 0, 1, ...
        """
        first = self.seq_lens - self.q_lens
        first = jnp.maximum(first, 0) if mask.sees_all else first
        return first, jnp.where(self.q_lens > 0, first + self.q_lens - 1, -1)

    def covers(self, num_tokens: int) -> jax.Array:
        """bool[num_tokens]: whether a token is a query of one of the sequences."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        return jnp.any((token >= self.starts) & (token < self.starts + self.q_lens), axis=1)


class QueryTile(NamedTuple):
    """One query tile, int32[] each; or several of a step, int32[n] each."""

    seq: jax.Array
    seq_len: jax.Array
    token: jax.Array  # first query token
    first_pos: jax.Array  # its position
    last_pos: jax.Array  # position of the last query token, -1 where there is no tile
    num_sink_pages: jax.Array
    first_page: jax.Array
    num_pages: jax.Array
    sink_tokens: jax.Array  # of its sequence; 0 unless the mask has `sinks_by_sequence`

    @property
    def run(self) -> PageRun:
        """Pages that the tile sees."""
        return PageRun(self.num_sink_pages, self.first_page, self.num_pages)

    def reaches(self, mask: MaskRule, key_pos: jax.Array) -> jax.Array:
        """bool[..., keys]: whether any query sees the key at `key_pos` int32[..., keys], of tiles int32[...]."""
        fields = (self.first_pos, self.last_pos, self.seq_len, self.sink_tokens)
        return mask.visible(key_pos, *(x[..., None] for x in fields))

    def sees(self, mask: MaskRule, key_pos: jax.Array, queries: int) -> jax.Array:
        """bool[..., queries, keys]: whether the `queries` first queries see it; those beyond the end see nothing."""
        place, key = jnp.arange(queries, dtype=jnp.int32)[:, None], key_pos[..., None, :]
        pos = self.first_pos[..., None, None] + place
        visible = mask.visible(key, pos, pos, self.seq_len[..., None, None], self.sink_tokens[..., None, None])
        return visible & (pos >= 0) & (pos <= self.last_pos[..., None, None])


class Schedule(NamedTuple):
    """Work of a step; N is the room for query tiles."""

    tiles: jax.Array  # int32[N, fields of QueryTile]
    starts: jax.Array  # int32[2, N] first work item of each tile in part 0 and 1
    ends: jax.Array  # int32[2, N] one after its last: the start where the tile belongs to the other part
    ranks: jax.Array  # int32[2, N] tiles with work in part 0 and 1, up to and with each

    def num_items(self, part: int) -> jax.Array:
        """int32[], work items of part 0 or 1."""
        return self.ends[part, -1]

    def item(self, part: int, i: jax.Array) -> tuple[QueryTile, jax.Array]:
        """(query tile, index of its KV tile int32[...]) of the `i`-th work items, `i` int32[...].

        Beyond the last item: a tile that sees no page, of a sequence that is not there.
        """
        tile = jnp.sum(self.ends[part] <= i[..., None], axis=-1, dtype=jnp.int32)
        known = tile < self.tiles.shape[0]
        tile = jnp.minimum(tile, self.tiles.shape[0] - 1)
        fields = QueryTile(*jnp.moveaxis(self.tiles[tile], -1, 0))
        none = jnp.iinfo(jnp.int32).max
        fields = fields._replace(
            seq=jnp.where(known, fields.seq, none), num_pages=jnp.where(known, fields.num_pages, 0)
        )
        return fields, i - self.starts[part, tile]

    def num_tiles(self, part: int) -> jax.Array:
        """int32[], query tiles that have work items in part 0 or 1."""
        return self.ranks[part, -1]

    def tile(self, part: int, n: jax.Array) -> tuple[QueryTile, jax.Array]:
        """(the `n`-th query tile that has work items in the part, how many it has), int32[]."""
        tile = jnp.sum(self.ranks[part] <= n, dtype=jnp.int32)
        return QueryTile(*self.tiles[tile]), self.ends[part, tile] - self.starts[part, tile]


def make_schedule(
    batch: Batch,
    mask: MaskRule,
    *,
    num_tokens: int,
    queries: int,  # most queries of a tile
    few: int = 1,  # most queries of a sequence of part 0, at most `queries`
    tile_pages: tuple[int, int],  # pages of a KV tile, in part 0 and in part 1
    page_size: int,
) -> Schedule:
    """The schedule of one step and one kind of layer."""
    room = min(num_tokens, num_tokens // queries + batch.seq_lens.shape[0])
    tiles, _ = query_tiles(batch, mask, room=room, queries=queries, page_size=page_size)
    kv_tiles = jnp.stack([-(-tiles.num_pages // pages) for pages in tile_pages])
    is_short = (batch.q_lens <= few)[tiles.seq]
    counts = jnp.where(is_short[None] == jnp.array([[True], [False]]), kv_tiles, 0)
    item_ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    ranks = jnp.cumsum(counts > 0, axis=1, dtype=jnp.int32)
    return Schedule(jnp.stack(tiles, axis=1), item_ends - counts, item_ends, ranks)


def query_tiles(
    batch: Batch, mask: MaskRule, *, room: int, queries: int, page_size: int
) -> tuple[QueryTile, jax.Array]:
    """(all query tiles of a step, in order of sequences and tokens, how many of the `room` there are).

    Where every query sees every key a sequence may have more queries than keys; they then stand at 0, 1, ...
    """
    ends = jnp.cumsum(-(-batch.q_lens // queries), dtype=jnp.int32)
    n = jnp.arange(room, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(ends[None] <= n[:, None], axis=1, dtype=jnp.int32), batch.seq_lens.shape[0] - 1)
    sinks = jnp.zeros_like(ends) if batch.sink_tokens is None else batch.sink_tokens
    seq_len, start, q_len, end, sinks = jnp.stack([*batch[:3], ends, sinks])[:, seq]
    first = (n - end) * queries + -(-q_len // queries) * queries
    base = jnp.maximum(seq_len - q_len, 0) if mask.sees_all else seq_len - q_len
    first_pos = base + first
    last_pos = jnp.where(n < end, base + jnp.minimum(first + queries, q_len) - 1, -1)
    run = mask.page_run(first_pos, last_pos, seq_len, page_size, sinks)
    return QueryTile(seq, seq_len, start + first, first_pos, last_pos, *run, sinks), ends[-1]


MOST_FEW = 8  # queries of a sequence of few


def few_queries(num_tokens: int, num_seqs: int, queries: int) -> int:
    """Most queries of a sequence of few, where a query tile has at most `queries`.

    As many as every sequence of the step can have, if that is a small number: 1 in the shape of a decoding step, 1 + k
    in that of a step with k drafts.
    """
    share = num_tokens // num_seqs
    return min(queries, share if 1 <= share <= MOST_FEW else 1)

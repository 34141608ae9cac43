"""Query tiles of the GPU's prefill kernel: how tokens and heads fill the rows of two warpgroups, and their table.

Flow:    lengths of the step + mask rule -> [plan_tiles] -> int32 table -> one thread block per tile and heads

A tile is up to `tokens` successive tokens of one sequence by `heads` query heads of one KV head, head-major: row
`head * tokens + token` of 128, where rows 0 to 63 are the first warpgroup's. Groups of more than 16 heads take several
tiles. A *piece* is what a warpgroup has of one head, a multiple of 8 rows:

    tokens 24, heads 5:    row 0      24     48   64  72     96        120  128
                               head 0 head 1 head 2    head 3  head 4   -
                               warpgroup 0       warpgroup 1

A tile that would reach beyond the array of queries starts earlier and skips its first tokens.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.mosaic import ROWS
from pallas_kernels.gpu.plan import MIN_GROUP_ROWS, GpuConfig, Keys
from pallas_kernels.layouts import cdiv
from pallas_kernels.schedule import Batch, query_tiles

WARPGROUPS = 2  # that attend
TILE_ROWS = WARPGROUPS * ROWS
_MAX_HEADS = TILE_ROWS // 8


class TileField(enum.IntEnum):
    """Scalars of a query tile."""

    SEQ = 0  # row of the block tables
    TOKEN = 1  # first query token that it reads
    SKIP = 2  # tokens before its own
    NUM_QUERIES = 3  # its own tokens
    POS = 4  # position of the first token that it reads
    SEQ_LEN = 5
    KEYS = 6  # the fields of `Keys` follow


class Piece(NamedTuple):
    """Rows of one head in one warpgroup."""

    row: int  # first row in the warpgroup
    head: int  # of the tile's
    token: int  # first token, of the tile's
    num_rows: int


class TileShape(NamedTuple):
    """How tokens and heads fill a tile."""

    tokens: int
    heads: int

    @classmethod
    def of(cls, group: int) -> TileShape:
        """For `group` query heads per KV head: the most heads that divide it, then the most tokens."""
        heads = max(n for n in range(1, min(group, _MAX_HEADS) + 1) if group % n == 0)
        return cls(TILE_ROWS // heads // 8 * 8, heads)

    def pieces(self, warpgroup: int) -> list[Piece]:
        """The pieces of one warpgroup, in order of rows."""
        first, end = warpgroup * ROWS, (warpgroup + 1) * ROWS
        found = []
        for head in range(self.heads):
            start, stop = max(head * self.tokens, first), min((head + 1) * self.tokens, end)
            if start < stop:
                found.append(Piece(start - first, head, start - head * self.tokens, stop - start))
        return found


def plan_tiles(batch: Batch, config: GpuConfig, shape: TileShape, num_tokens: int) -> jax.Array:
    """int32[tiles, fields] of the sequences with queries in `batch`; tiles beyond them have neither queries nor keys.

    Queries that see no key, such as those at positions below 0, are in tiles as others are.

    `num_tokens` is the length of the array of queries, at least `shape.tokens`.
    """
    room = min(num_tokens, num_tokens // shape.tokens + batch.seq_lens.shape[0])
    tile, count = query_tiles(batch, config.mask, room=room, queries=shape.tokens, page_size=config.page_size)
    places = (tile.first_pos, tile.last_pos, tile.seq_len)
    keys = Keys.of_tiles(config.mask, *places, config.page_size, config.block, tile.sink_tokens)
    token = jnp.clip(tile.token, 0, num_tokens - shape.tokens)
    skip = tile.token - token
    own = {
        TileField.SEQ: tile.seq,
        TileField.TOKEN: token,
        TileField.SKIP: skip,
        TileField.NUM_QUERIES: tile.last_pos - tile.first_pos + 1,
        TileField.POS: tile.first_pos - skip,
        TileField.SEQ_LEN: tile.seq_len,
    }
    columns = [own[field] for field in TileField if field < TileField.KEYS]
    table = jnp.stack([*columns, *keys], axis=1)
    is_live = jnp.arange(room, dtype=jnp.int32) < count
    return jnp.where(is_live[:, None], table, 0).astype(jnp.int32)


def tile_shape(num_heads: int) -> TileShape:
    """Tokens and heads of a tile: the most heads that divide `num_heads`, then the most tokens."""
    heads = max(n for n in range(1, min(num_heads, ROWS) + 1) if num_heads % n == 0)
    return TileShape(ROWS // heads, heads)


def padded_rows(q: jax.Array) -> jax.Array:
    """Query tiles [U, rows, D] with rows a multiple of 8."""
    return jnp.pad(q, [(0, 0), (0, cdiv(q.shape[1], MIN_GROUP_ROWS) * MIN_GROUP_ROWS - q.shape[1]), (0, 0)])

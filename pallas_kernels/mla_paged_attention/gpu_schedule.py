"""What all layers of one kind share in a step of latent attention on the GPU: one line of pieces, and its queries.

Flow:    lengths of the step + LatentSizes -> [LatentSchedule.of], once a step -> the launches of every layer

Pieces of sequences that decode, whose keys are split over the card, come first; then tiles of all others, which have a
thread block each. One launch attends both:

    piece           0 ... num_split - 1        num_split ...
    query tile      its sequence's, its part   one after the other, part by part
    thread block    a share of pieces          one piece, the last first: they see the most keys

A step of which the host knows that every sequence decodes has no tiles, and its tokens are its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import launches
from pallas_kernels.gpu.plan import Field, GpuConfig, Keys, plan_decode
from pallas_kernels.gpu.tiles import TileField, TileShape, plan_tiles
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch


class LatentSizes(NamedTuple):
    """All that a schedule depends on beside the step's lengths."""

    mask: MaskRule
    page_size: int
    num_tokens: int  # of the array of queries
    num_seqs: int
    parts: int  # tiles of the same tokens
    tile: TileShape
    num_blocks: int  # thread blocks that share the work of decoding
    is_decode: bool  # every sequence of the step decodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryTiles:
    """Which tokens stand in query tiles, and where."""

    tokens: jax.Array  # int32[S + tiles, tokens of a tile] by tile, those that decode first
    decoded: jax.Array  # int32[S] token of each sequence that decodes, -1: it does not
    seen: jax.Array  # bool[T] whether a token is in a tile of those that do not decode
    tile: jax.Array  # int32[T] that tile, those that decode not counted
    place: jax.Array  # int32[T] its place there


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentSchedule:
    """The plan of one step; `sizes` are static."""

    pieces: jax.Array  # int32[pieces, fields]
    tiles: jax.Array  # int32[pieces] query tile of each
    blocks: jax.Array  # int32[thread blocks, 2] first piece of each, and one after its last
    units: jax.Array  # int32[S * parts, 2] as in Shares
    queries: QueryTiles | None  # None: every sequence decodes
    sizes: LatentSizes = field(metadata={"static": True})

    @property
    def num_split(self) -> int:
        """Pieces of sequences that decode."""
        return self.sizes.num_seqs * self.sizes.parts + self.sizes.num_blocks

    @classmethod
    def of(
        cls,
        seq_lens: jax.Array,  # int32[S]
        query_start_loc: jax.Array,  # int32[S + 1]
        distribution: jax.Array,  # int32[3]
        config: GpuConfig,
        sizes: LatentSizes,
    ) -> LatentSchedule:
        """The schedule of a step."""
        decoding, others = launches.split(seq_lens, query_start_loc, distribution, sizes.mask)
        decode_config = replace(config, num_kv_heads=sizes.parts)
        plan = plan_decode(decoding, decode_config, sizes.num_blocks)
        pieces = plan.pieces
        tiles = pieces[:, Field.SEQ] * sizes.parts + pieces[:, Field.HEAD]
        if sizes.is_decode:
            return cls(pieces, tiles, plan.blocks, plan.units, None, sizes)
        table = plan_tiles(others, config, sizes.tile, max(sizes.num_tokens, sizes.tile.tokens))
        own, own_blocks = _tile_pieces(table, sizes, pieces.shape[0])
        number = jnp.arange(own.shape[0], dtype=jnp.int32)
        return cls(
            jnp.concatenate([pieces, own]),
            jnp.concatenate([tiles, sizes.num_seqs * sizes.parts + number]),
            jnp.concatenate([plan.blocks, own_blocks]),
            plan.units,
            _query_tiles(table, decoding, others, sizes),
            sizes,
        )


def _tile_pieces(table: jax.Array, sizes: LatentSizes, num_before: int) -> tuple[jax.Array, jax.Array]:
    """(pieces of query tiles, part by part, thread blocks of them) behind `num_before` pieces."""
    num_tiles, parts = table.shape[0], sizes.parts
    part = jnp.broadcast_to(jnp.arange(parts, dtype=jnp.int32), (num_tiles, parts)).reshape(-1, 1)
    table = jnp.repeat(table, parts, axis=0)
    keys = table[:, TileField.KEYS : TileField.KEYS + len(Keys._fields)]
    fields = (table[:, TileField.SEQ, None], part, keys, table[:, TileField.POS : TileField.SEQ_LEN + 1])
    number = num_before + jnp.arange(num_tiles * parts, dtype=jnp.int32)
    has_queries = (table[:, TileField.NUM_QUERIES] > 0).astype(jnp.int32)
    return jnp.concatenate(fields, axis=1), jnp.stack([number, number + has_queries], axis=1)[::-1]


def _query_tiles(table: jax.Array, decoding: Batch, others: Batch, sizes: LatentSizes) -> QueryTiles:
    """Tokens of tiles, and tiles of tokens."""
    num_tokens, most = sizes.num_tokens, sizes.num_tokens - 1
    decoded = jnp.where(decoding.q_lens > 0, decoding.starts, -1)
    place = jnp.arange(sizes.tile.tokens, dtype=jnp.int32)
    tokens = jnp.minimum(table[:, TileField.TOKEN, None] + place, most)
    own = jnp.broadcast_to(jnp.clip(decoded, 0, most)[:, None], (sizes.num_seqs, sizes.tile.tokens))
    has_queries = table[:, TileField.NUM_QUERIES] > 0
    first = jnp.where(has_queries, table[:, TileField.TOKEN] + table[:, TileField.SKIP], num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.maximum(jnp.sum(first[None] <= token[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    return QueryTiles(
        jnp.concatenate([own, tokens]),
        decoded,
        others.covers(num_tokens),
        tile,
        jnp.clip(token - table[tile, TileField.TOKEN], 0, sizes.tile.tokens - 1),
    )

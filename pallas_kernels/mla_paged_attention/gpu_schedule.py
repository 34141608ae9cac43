"""What all layers of one kind share in a step of latent attention on the GPU: one line of pieces, and its queries.

Flow:    lengths of the step + LatentSizes -> [LatentSchedule.of], once a step -> the launches of every layer

Pieces of sequences that decode, whose keys are split over the card, come first; then tiles of all others, which have a
thread block each. One launch attends both:

    piece           0 ... num_split - 1        num_split ...
    query tile      its sequence's, its part   one after the other, part by part
    thread block    a share of pieces          one piece, the last first: they see the most keys

A sequence *decodes* if it has at most `LatentSizes.queries` queries: one, or in a step with drafts as many as each
sequence of its shape can have. They stand in one query tile or several, whose keys are split apart. A step of which the
host knows that every sequence decodes has no other tiles; where that is one query each, its tokens are its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.plan import DecodePlan, Field, GpuConfig, Keys, plan_pieces
from pallas_kernels.gpu.slots import slots_of_tokens, tokens_of_slots
from pallas_kernels.gpu.tiles import TileField, TileShape, plan_tiles
from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch, few_queries

_MOST_UNITS = 512  # of sequences of several query tiles: their pieces are 128 KiB each in DeepSeek V3


class LatentSizes(NamedTuple):
    """All that a schedule depends on beside the step's lengths."""

    mask: MaskRule
    page_size: int
    num_tokens: int  # of the array of queries
    num_seqs: int
    parts: int  # tiles of the same tokens
    tile: TileShape
    queries: int  # most tokens of a sequence that decodes
    num_blocks: int  # thread blocks that share the work of decoding
    is_decode: bool  # every sequence of the step decodes

    @property
    def decode_tiles(self) -> int:
        """Query tiles of a sequence that decodes."""
        return cdiv(self.queries, self.tile.tokens)

    @property
    def tile_slots(self) -> int:
        """Slots for tokens in each of them."""
        return min(self.queries, self.tile.tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OtherTokens:
    """Tokens of a step in which not all decode."""

    decoded: jax.Array  # int32[S * slots] token of each slot, -1: none
    seen: jax.Array  # bool[T] whether a token is in a tile of those that do not decode
    tile: jax.Array  # int32[T] that tile, those that decode not counted
    place: jax.Array  # int32[T] its place there


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryTiles:
    """Which tokens stand in query tiles, and where."""

    tokens: jax.Array  # int32[query tiles, tokens of a tile], those that decode first
    slots: jax.Array | None  # int32[T] slot of each token, -1: none; None: there are others
    others: OtherTokens | None  # None: every sequence decodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentSchedule:
    """The plan of one step; `sizes` are static."""

    pieces: jax.Array  # int32[pieces, fields]
    tiles: jax.Array  # int32[pieces] query tile of each
    blocks: jax.Array  # int32[thread blocks, 2] first piece of each, and one after its last
    units: jax.Array  # int32[S * query tiles * parts, 2] as in Shares
    queries: QueryTiles | None  # None: every sequence decodes, and its tokens are its sequences
    sizes: LatentSizes = field(metadata={"static": True})

    @property
    def num_split(self) -> int:
        """Pieces of sequences that decode."""
        return self.sizes.num_seqs * self.sizes.decode_tiles * self.sizes.parts + self.sizes.num_blocks

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
        batch = Batch.of_step(seq_lens, query_start_loc, distribution).seeing(sizes.mask)
        num_decode = distribution[2] if sizes.queries > 1 else distribution[0]
        decodes = (jnp.arange(sizes.num_seqs, dtype=jnp.int32) < num_decode) & (batch.q_lens <= sizes.queries)
        decoding, others = (batch._replace(q_lens=jnp.where(own, batch.q_lens, 0)) for own in (decodes, ~decodes))
        plan = _plan_decode(decoding, replace(config, num_kv_heads=sizes.parts), sizes)
        tiles = plan.pieces[:, Field.SEQ] * sizes.parts + plan.pieces[:, Field.HEAD]
        pieces = plan.pieces
        if sizes.decode_tiles > 1:
            pieces = pieces.at[:, Field.SEQ].set(pieces[:, Field.SEQ] // sizes.decode_tiles)
        if sizes.is_decode:
            queries = None
            if sizes.queries > 1:
                slots = slots_of_tokens(decoding, sizes.decode_tiles * sizes.tile_slots, sizes.num_tokens)
                queries = QueryTiles(_decode_tokens(decoding, sizes), slots, None)
            return cls(pieces, tiles, plan.blocks, plan.units, queries, sizes)
        table = plan_tiles(others, config, sizes.tile, max(sizes.num_tokens, sizes.tile.tokens))
        own, own_blocks = _tile_pieces(table, sizes, pieces.shape[0])
        number = jnp.arange(own.shape[0], dtype=jnp.int32)
        return cls(
            jnp.concatenate([pieces, own]),
            jnp.concatenate([tiles, sizes.num_seqs * sizes.decode_tiles * sizes.parts + number]),
            jnp.concatenate([plan.blocks, own_blocks]),
            plan.units,
            _query_tiles(table, decoding, others, sizes),
            sizes,
        )


def most_queries(num_tokens: int, num_seqs: int, tile: TileShape, parts: int) -> int:
    """`LatentSizes.queries` of a step of these shapes: as `few_queries`, of so many query tiles that pieces are few."""
    return few_queries(num_tokens, num_seqs, tile.tokens * max(1, _MOST_UNITS // (num_seqs * parts)))


def _plan_decode(decoding: Batch, config: GpuConfig, sizes: LatentSizes) -> DecodePlan:
    """The work list of the query tiles of sequences that decode, `Field.SEQ` counting these."""
    first, last = (x[:, None] for x in decoding.positions(config.mask))
    own_first = first + jnp.arange(sizes.decode_tiles, dtype=jnp.int32) * sizes.tile.tokens
    own_last = jnp.where(own_first <= last, jnp.minimum(own_first + sizes.tile.tokens - 1, last), -1)
    seq_lens = jnp.repeat(decoding.seq_lens, sizes.decode_tiles)
    return plan_pieces(own_first.reshape(-1), own_last.reshape(-1), seq_lens, config, sizes.num_blocks)


def _decode_tokens(decoding: Batch, sizes: LatentSizes) -> jax.Array:
    """int32[S * query tiles, tokens of a tile]; beyond a sequence's last token that one again."""
    place = jnp.arange(sizes.decode_tiles * sizes.tile.tokens, dtype=jnp.int32)
    own = decoding.starts[:, None] + jnp.minimum(place, jnp.maximum(decoding.q_lens[:, None] - 1, 0))
    return jnp.minimum(own, sizes.num_tokens - 1).reshape(-1, sizes.tile.tokens)


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
    place = jnp.arange(sizes.tile.tokens, dtype=jnp.int32)
    tokens = jnp.minimum(table[:, TileField.TOKEN, None] + place, most)
    has_queries = table[:, TileField.NUM_QUERIES] > 0
    first = jnp.where(has_queries, table[:, TileField.TOKEN] + table[:, TileField.SKIP], num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.maximum(jnp.sum(first[None] <= token[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    of_others = OtherTokens(
        tokens_of_slots(decoding, sizes.decode_tiles * sizes.tile_slots),
        others.covers(num_tokens),
        tile,
        jnp.clip(token - table[tile, TileField.TOKEN], 0, sizes.tile.tokens - 1),
    )
    return QueryTiles(jnp.concatenate([_decode_tokens(decoding, sizes), tokens]), None, of_others)

"""The table of items that one launch of a TPU attention kernel goes through.

Flow:    lengths of the step + mask rule -> [plan_items] -> int32 table in SMEM

An *item* is up to `queries` successive query tokens of one sequence. Its KV is the page run of the mask rule (sink
pages, then a contiguous run), read in *blocks* of `block` slots. Steps of an item, in the order they run:

    0 ... num_full              blocks that every row sees whole, without a mask
    ... num_full + num_lead     leading blocks, which sink tokens or lower bounds cut
    ... num_blocks              trailing blocks, which upper bounds or the end cut

Slots of the contiguous run are numbered without holes: where ranks of context parallelism share the tokens, by the
rank's own tokens, and so are `LOWER` and `UPPER`. Positions of queries are those of whole sequences.

The last item of the table has no blocks and stands for the end: `NEXT` of the last item with blocks names it.
"""

from __future__ import annotations

import enum
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.key_share import KeyShare
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch, query_tiles


class Field(enum.IntEnum):
    """Scalars of an item."""

    TABLE = 0  # first entry of its block table
    TOKEN = 1  # first query token that its tile of queries reads
    SKIP = 2  # tokens of the tile before the item's own
    NUM_QUERIES = 3  # its own tokens
    POS = 4  # position of the tile's first token
    LOWER = 5  # first key of the pages that any of its queries sees, sink tokens apart
    UPPER = 6  # last key of the pages that any of its queries sees
    BORDER = 7  # first chunk border after its first query
    SINK_PAGES = 8  # pages of its run before the contiguous part
    SHIFT = 9  # column of a page of the contiguous part, less its number in the run
    NUM_PAGES = 10
    NUM_BLOCKS = 11
    NUM_FULL = 12
    NUM_LEAD = 13
    STEP = 14  # blocks of all items before: they tell the buffer of its first block
    NEXT = 15  # the next item that has blocks
    RANK = 16  # of context parallelism; this and the next only where `num_fields` counts them
    SINK_TOKENS = 17  # first keys of the pages that all later queries of its sequence see


class ItemSizes(Protocol):
    """What items and their blocks depend on: part of every kernel's static description."""

    @property
    def mask(self) -> MaskRule:
        """Who sees what."""

    @property
    def queries(self) -> int:
        """Most query tokens of an item; 1: decode."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""

    @property
    def block(self) -> int:
        """Slots of a KV block."""

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""

    @property
    def table_stride(self) -> int:
        """Entries from one row of the block tables to the next."""

    @property
    def tables_in_hbm(self) -> bool:
        """Whether the block tables exceed scalar memory."""

    @property
    def context_size(self) -> int | None:
        """Ranks that share the tokens, as `KeyShare` says; None: the pages hold whole sequences."""


def num_fields(sizes: ItemSizes) -> int:
    """Fields that a table of items has."""
    if sizes.mask.sinks_by_sequence:
        return len(Field)
    return Field.RANK if sizes.context_size is None else Field.SINK_TOKENS


def plan_items(
    batch: Batch, config: ItemSizes, num_tokens: int, share: KeyShare | None = None
) -> tuple[jax.Array, jax.Array]:
    """(table int32[fields * (room + 1)], number of items int32[]) of the sequences with queries in `batch`.

    `num_tokens` is the length of the array of queries. The last column is the item that stands for the end.
    """

    def held(end: jax.Array) -> jax.Array:
        return end if share is None else share.count(end)

    mask, queries, block = config.mask, config.queries, config.block
    room = min(num_tokens, num_tokens // queries + batch.seq_lens.shape[0])
    column_tokens = config.page_size * (1 if share is None else share.size)
    tile, count = query_tiles(batch, mask, room=room, queries=queries, page_size=column_tokens)
    live = tile.last_pos >= 0
    token = jnp.clip(tile.token, 0, num_tokens - queries)
    skip = tile.token - token
    run_start = (tile.first_page - tile.num_sink_pages) * config.page_size  # number of slot 0, sink pages apart
    num_blocks = -(-tile.num_pages * config.page_size // block)
    first_seen = mask.first_seen(tile.last_pos, tile.sink_tokens)
    cut = jnp.maximum(held(first_seen) - run_start, tile.num_sink_pages * config.page_size)
    num_lead = jnp.clip(-(-cut // block), 0, num_blocks)
    whole = held(mask.upper(tile.first_pos, tile.seq_len) + 1) - run_start
    num_full = jnp.clip(whole // block - num_lead, 0, num_blocks)
    chunk = mask.attention_chunk_size
    with_blocks = jnp.where(live & (num_blocks > 0), jnp.arange(room, dtype=jnp.int32), room)
    fields = {
        Field.TABLE: tile.seq * config.table_stride,
        Field.TOKEN: token,
        Field.SKIP: skip,
        Field.NUM_QUERIES: tile.last_pos - tile.first_pos + 1,
        Field.POS: tile.first_pos - skip,
        Field.LOWER: held(mask.lower(tile.first_pos)),
        Field.UPPER: held(mask.upper(tile.last_pos, tile.seq_len) + 1) - 1,
        Field.BORDER: jnp.zeros_like(token) if chunk is None else (tile.first_pos // chunk + 1) * chunk,
        Field.SINK_PAGES: tile.num_sink_pages,
        Field.SHIFT: tile.first_page - tile.num_sink_pages,
        Field.NUM_PAGES: tile.num_pages,
        Field.NUM_BLOCKS: num_blocks,
        Field.NUM_FULL: num_full,
        Field.NUM_LEAD: num_lead,
        Field.STEP: jnp.cumsum(num_blocks) - num_blocks,
        Field.NEXT: jnp.append(lax.cummin(with_blocks, reverse=True)[1:], room),
    }
    if num_fields(config) > Field.RANK:
        fields[Field.RANK] = jnp.broadcast_to(jnp.asarray(0 if share is None else share.rank, jnp.int32), (room,))
    if mask.sinks_by_sequence:
        fields[Field.SINK_TOKENS] = held(tile.sink_tokens)
    table = jnp.stack([jnp.where(live | (field == Field.NEXT), x, 0) for field, x in fields.items()])
    end = jnp.zeros((len(fields), 1), jnp.int32).at[Field.NEXT].set(room)
    table = jnp.concatenate([table, end], axis=1)
    return table.reshape(-1).astype(jnp.int32), count


def seen_slots(mask: MaskRule, queries: int, num_columns: int, page_size: int, ranks: int = 1) -> int:
    """Slots that a tile can see at most, rounded up to a power of two: no block need be longer."""
    seen = mask.max_pages(queries, num_columns, page_size * ranks) * page_size
    return 1 << (seen - 1).bit_length()

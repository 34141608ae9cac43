"""Which keys a query tile meets at a time: the pages of its run, a KV tile after the other.

Flow:    schedule + pages + mask rule -> [TileWalk] -> KV tiles, who sees what -> reference

Work comes in two parts of the schedule, with two shapes of tiles:

    part 0    sequences of `few` queries at most     many work items at once
    part 1    tiles of `queries` of the others       one query tile after the other

A KV tile is a few pages of the mask's page run. Cost follows the tokens seen and not the buckets T, S, P. No mask or
score ever exceeds `queries` by one KV tile, or a trip's work items by theirs.
A non-finite key or value can reach only queries of its own sequence that share a query tile with one that sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule, PageRun
from pallas_kernels.paged_tiles import KVTile, PagedReader, column_tokens
from pallas_kernels.schedule import Batch, QueryTile, Schedule, make_schedule

_TILE_KEYS = 64  # about so many keys of a KV tile: a longer one has more that no query sees


class TileReader(PagedReader, Protocol):
    """Pages of one layer, read a tile of one sequence at a time."""

    def read(self, seq: jax.Array, run: PageRun, first: jax.Array, tile_pages: int) -> KVTile:
        """The `tile_pages` pages of sequence `seq` from page `first` of its run on."""


@dataclass(frozen=True)
class TileWalk:
    """The work of one step over the pages of one layer."""

    cache: TileReader
    mask: MaskRule
    schedule: Schedule
    sizes: tuple[int, int]  # queries of a tile, in part 0 and in part 1
    tile_pages: tuple[int, int]  # pages of a KV tile
    most_items: int  # work items that part 0 can have

    @classmethod
    def of_step(
        cls,
        cache: TileReader,
        mask: MaskRule,
        batch: Batch,
        *,
        num_tokens: int,
        sizes: tuple[int, int],
        by_page: bool,
    ) -> TileWalk:
        """With query tiles of at most `sizes` tokens; `by_page`: KV tiles of part 0 are single pages."""
        num_seqs, num_columns = cache.block_tables.shape
        few, queries = sizes
        most = [mask.max_pages(size, num_columns, column_tokens(cache)) for size in sizes]
        tiles = [cdiv(pages, max(1, _TILE_KEYS // cache.page_size)) for pages in most]
        if by_page:
            tiles[0] = most[0]
        tile_pages = (cdiv(most[0], tiles[0]), cdiv(most[1], tiles[1]))
        schedule = make_schedule(
            batch,
            mask,
            num_tokens=num_tokens,
            queries=queries,
            few=few,
            tile_pages=tile_pages,
            page_size=column_tokens(cache),
        )
        return cls(cache, mask, schedule, (few, queries), tile_pages, num_seqs * tiles[0])

    def read(self, part: int, tile: QueryTile, kv_tile: jax.Array) -> tuple[KVTile, jax.Array]:
        """KV tile number `kv_tile` of a query tile, V zero where no query sees it, and who sees what.

        That is bool[queries, keys]; queries beyond the tile's end see nothing.
        """
        size, tile_pages = self.sizes[part], self.tile_pages[part]
        kv = self.cache.read(tile.seq, tile.run, kv_tile * tile_pages, tile_pages)
        seen = tile.reaches(self.mask, kv.key_pos)
        visible = tile.sees(self.mask, kv.key_pos, size)
        return kv._replace(v=jnp.where(seen[:, None, None], kv.v, 0.0)), visible

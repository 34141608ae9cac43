"""The loop of the references: every query tile of a step by every KV tile that it sees.

Flow:    inputs per query token + pages + mask rule -> [walk] -> carry per query token

One dynamic loop over the work items (query tile, KV tile) that the step really has, so that cost follows the tokens
seen and not the buckets T, S, P. It runs twice, with two shapes of tiles:

    one-token rows    1 query        x 128 keys
    longer rows       `queries` ones x 128 keys

A KV tile is a few pages of the mask's page run. No mask or score ever exceeds one tile of queries by one tile of keys.
A non-finite key or value can reach only queries of its own sequence that share a query tile with one that sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import cdiv
from pallas_kernels.ragged_paged_attention.mask import MaskRule, PageRun
from pallas_kernels.ragged_paged_attention.paged_tiles import KVTile
from pallas_kernels.ragged_paged_attention.schedule import Batch, QueryTile, make_schedule
from pallas_kernels.varying import vary_like

_TILE_KEYS = 128

# Trees of arrays [heads, tokens, ...]; what a head is, is the caller's.
ByToken = Any


class TileReader(Protocol):
    """Pages of one layer."""

    @property
    def pages(self) -> tuple[jax.Array, ...]:
        """The page arrays."""

    @property
    def block_tables(self) -> jax.Array:
        """int32[S, P]."""

    @property
    def page_size(self) -> int:
        """Keys of a page."""

    def read(self, seq: jax.Array, run: PageRun, first: jax.Array, tile_pages: int) -> KVTile:
        """The `tile_pages` pages of sequence `seq` from page `first` of its run on."""


def walk(
    cache: TileReader,
    mask: MaskRule,
    batch: Batch,
    body: Callable[[ByToken, ByToken, KVTile, jax.Array], ByToken],
    inputs: ByToken,
    carry: ByToken,
    *,
    queries: int,
) -> ByToken:
    """`carry` after all KV tiles of all query tokens.

    `body(carry, inputs, kv, visible)` gives the new carry of the tokens of one query tile, n of them: `carry` and
    `inputs` are the slices [heads, n, ...], `visible` bool[n, keys] says who sees what, and the values of keys that
    nobody sees are zero. Tokens beyond the tile's end see nothing; `body` must leave their carry as it is.
    """
    num_tokens = jax.tree.leaves(inputs)[0].shape[1]
    queries = min(num_tokens, queries)
    tile_pages = (_tile_pages(cache, mask, 1), _tile_pages(cache, mask, queries))
    schedule = make_schedule(
        batch, mask, num_tokens=num_tokens, queries=queries, tile_pages=tile_pages, page_size=cache.page_size
    )
    inputs, carry = jax.tree.map(lambda x: _pad_tokens(x, queries), (inputs, carry))
    carry = vary_like(carry, *jax.tree.leaves(inputs), *schedule, *cache.pages, cache.block_tables)
    for part, size in enumerate((1, queries) if num_tokens > 1 else (1,)):

        def trip(i: jax.Array, carry: ByToken, part: int = part, size: int = size) -> ByToken:
            tile, kv_tile = schedule.item(part, i)
            old, given = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile.token, size, axis=1), (carry, inputs))
            kv, visible = _read(cache, mask, tile, kv_tile * tile_pages[part], size, tile_pages[part])
            new = body(old, given, kv, visible)
            return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, tile.token, axis=1), carry, new)

        carry = lax.fori_loop(0, schedule.num_items(part), trip, carry)
    return jax.tree.map(lambda x: x[:, :num_tokens], carry)


def _tile_pages(cache: TileReader, mask: MaskRule, queries: int) -> int:
    """Pages of a KV tile: about `_TILE_KEYS` keys, shared out evenly over the most pages that a query tile sees."""
    most = mask.max_pages(queries, cache.block_tables.shape[1], cache.page_size)
    return cdiv(most, cdiv(most, max(1, _TILE_KEYS // cache.page_size)))


def _pad_tokens(x: jax.Array, num_tokens: int) -> jax.Array:
    """`num_tokens` more along axis 1, so that a whole tile may start at the last token."""
    return jnp.pad(x, [(0, 0), (0, num_tokens), *[(0, 0)] * (x.ndim - 2)])


def _read(
    cache: TileReader, mask: MaskRule, tile: QueryTile, first_page: jax.Array, queries: int, tile_pages: int
) -> tuple[KVTile, jax.Array]:
    """Some pages of a query tile's run, V zero where no query sees it, and bool[queries, keys] who sees what."""
    kv = cache.read(tile.seq, tile.run, first_page, tile_pages)
    seen = mask.visible(kv.key_pos, tile.first_pos, tile.last_pos, tile.seq_len)
    pos = tile.first_pos + lax.broadcasted_iota(jnp.int32, (queries, 1), 0)
    visible = mask.visible(kv.key_pos[None], pos, pos, tile.seq_len) & (pos >= 0) & (pos <= tile.last_pos)
    return kv._replace(v=jnp.where(seen[None, :, None], kv.v, 0.0)), visible

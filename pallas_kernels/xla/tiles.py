"""Attention of some query tiles in plain XLA: the pages of many items gathered at a time, and batched products.

Flow:    query tiles + pages -> [attend_tiles] -> softmax states of the tiles

A trip gathers one KV tile for every lane (`xla.lanes`): K and V cross memory three times (read, written, read by the
products) in the dtype in which they are multiplied; logits are float32. Slots that no query sees are set to zero in the
gather. `Limits` bound the memory that this takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.layouts import cdiv
from pallas_kernels.mask import MaskRule, PageRun
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.paged_tiles import PagedReader, column_tokens, locate
from pallas_kernels.schedule import QueryTile
from pallas_kernels.varying import vary_like
from pallas_kernels.xla.lanes import Lanes

_STATE_PART = 16  # reading and writing the state of a tile's rows may cost one part in so many of its KV tile
_STATE_PASSES, _TILE_PASSES = 6, 3  # over the state, and over what a trip gathers and computes


@dataclass(frozen=True)
class Limits:
    """What is done at a time, at most; but for one item, and one tile."""

    trip_bytes: int = 64 << 20  # gathered K and V, logits and weights of a trip
    pieces_bytes: int = 64 << 20  # states of tiles that are walked together; and of lanes
    least_keys: int = 128  # of a KV tile
    most_keys: int = 1024


class PageReader(PagedReader, Protocol):
    """Pages of one layer, read many of any sequences at a time."""

    @property
    def values_are_keys(self) -> bool:
        """Whether a value is the first numbers of its key."""

    def at_pages(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V [N, page_size, Hkv, D] of pages int32[N]; both K where `values_are_keys`."""


class TileQueries(NamedTuple):
    """The queries of a step, of which tiles are runs of tokens."""

    q: jax.Array  # [T, Hkv, G, D] in the dtype of the products
    scale: jax.Array  # float32[Hkv] of the logits
    soft_cap: float | None

    def of(self, token: jax.Array) -> jax.Array:
        """[n, Hkv, queries * G, D] of tokens int32[n, queries]; those out of range are some other's."""
        rows = self.q[jnp.clip(token, 0, self.q.shape[0] - 1)].swapaxes(1, 2)
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


@dataclass(frozen=True)
class Sizes:
    """How much is done at a time."""

    queries: int  # of a query tile
    tile_pages: int  # of a KV tile
    num_lanes: int
    num_tiles: int  # query tiles that are walked together

    @classmethod
    def of(cls, queries: TileQueries, size: int, cache: PageReader, mask: MaskRule, room: int, limits: Limits) -> Sizes:
        """For tiles of `size` queries, of which a step has at most `room`."""
        _, num_kv_heads, group, head_dim = queries.q.shape
        dim_v, itemsize = cache.head_dim_v, queries.q.dtype.itemsize
        rows = size * group
        dims = head_dim if cache.values_are_keys else head_dim + dim_v
        state_bytes = 4 * num_kv_heads * rows * (dim_v + 2)
        key_bytes = num_kv_heads * (itemsize * dims + rows * (4 + itemsize))
        keys = _STATE_PART * _STATE_PASSES * state_bytes // (_TILE_PASSES * key_bytes)
        keys = min(max(keys, limits.least_keys), limits.most_keys)
        most = mask.max_pages(size, cache.block_tables.shape[1], column_tokens(cache))
        kv_tiles = cdiv(most, max(1, keys // cache.page_size))
        tile_pages = cdiv(most, kv_tiles)
        item_bytes = tile_pages * cache.page_size * key_bytes
        most_pieces = max(1, limits.pieces_bytes // state_bytes)
        num_tiles = min(room, most_pieces)
        num_items = num_tiles * kv_tiles
        num_lanes = min(num_items, most_pieces, max(1, limits.trip_bytes // item_bytes))
        num_lanes = cdiv(num_items, cdiv(num_items, num_lanes))  # so that the last trip of full tables is full, too
        return cls(size, tile_pages, num_lanes, num_tiles)

    def lanes(self, tiles: QueryTile) -> Lanes:
        """The lanes that share the KV tiles of `num_tiles` query tiles."""
        return Lanes.of(-(-tiles.num_pages // self.tile_pages), self.num_lanes)


def attend_tiles(
    queries: TileQueries, cache: PageReader, mask: MaskRule, tiles: QueryTile, sizes: Sizes
) -> SoftmaxState:
    """States of [C, Hkv, queries * G] rows of int32[C] tiles, over all keys that they see."""
    num_kv_heads, group = queries.q.shape[1:3]
    lanes = sizes.lanes(tiles)

    def trip(i: jax.Array, states: SoftmaxState) -> SoftmaxState:
        tile, kv_tile, piece = lanes.items(i)
        own = QueryTile(*(x[tile] for x in tiles))
        state = SoftmaxState(*(x.at[piece].get(mode="clip") for x in states))
        new = _attend_items(state, queries, cache, mask, own, kv_tile, sizes)
        return SoftmaxState(
            *(x.at[piece].set(y, mode="drop", unique_indices=True) for x, y in zip(states, new, strict=True))
        )

    states = online_softmax.empty((lanes.num_pieces, num_kv_heads, sizes.queries * group), cache.head_dim_v)
    states = vary_like(states, queries.q, *tiles, *cache.pages, cache.block_tables)
    with jax.named_scope("trips"):
        states = lax.fori_loop(0, lanes.share, trip, states)
    with jax.named_scope("merge"):
        return lanes.merged(states)


def _attend_items(
    state: SoftmaxState,  # of [n, Hkv, queries * G]
    queries: TileQueries,
    cache: PageReader,
    mask: MaskRule,
    tiles: QueryTile,  # int32[n] each
    kv_tile: jax.Array,  # int32[n]
    sizes: Sizes,
) -> SoftmaxState:
    """`state` after one KV tile of each query tile."""
    place = jnp.arange(sizes.queries, dtype=jnp.int32)
    ids, key_pos = locate_all(cache, tiles, kv_tile * sizes.tile_pages, sizes.tile_pages)
    k, v = _gathered(cache, ids, tiles.reaches(mask, key_pos), queries.q.dtype)
    rows = queries.of(tiles.token[:, None] + place)
    s = product("nhrd,nhkd->nhrk", rows, k) * queries.scale[:, None, None]
    if queries.soft_cap is not None:
        s = queries.soft_cap * jnp.tanh(s / queries.soft_cap)
    visible = tiles.sees(mask, key_pos, sizes.queries)
    by_query = s.reshape(*s.shape[:2], sizes.queries, -1, s.shape[-1])  # [n, Hkv, queries, G, keys]
    s = jnp.where(visible[:, None, :, None], by_query, -jnp.inf).reshape(s.shape)

    def values_of(p: jax.Array) -> jax.Array:
        return product("nhrk,nhkd->nhrd", p.astype(k.dtype), v)[..., : cache.head_dim_v]

    return online_softmax.update(state, s, values_of)


def locate_all(cache: PageReader, tiles: QueryTile, first: jax.Array, tile_pages: int) -> tuple[jax.Array, jax.Array]:
    """(ids int32[n, tile_pages], key positions int32[n, slots]) of tiles' pages from int32[n] `first` of their runs."""

    def one(seq: jax.Array, run: PageRun, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        return locate(cache, seq, run, first, tile_pages)

    return jax.vmap(one)(tiles.seq, tiles.run, first)


def _gathered(cache: PageReader, ids: jax.Array, seen: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """K and V [n, Hkv, slots, D] of int32[n, tile_pages] pages, 0 where not bool[n, slots] seen; V may be wider.

    The barrier has them written as they are, and not turned once more for the products.
    """

    def by_head(x: jax.Array) -> jax.Array:
        x = x.reshape(*seen.shape, *x.shape[2:])
        return jnp.where(seen[..., None, None], x.astype(dtype), 0).swapaxes(1, 2)

    k, v = cache.at_pages(ids.reshape(-1))
    if cache.values_are_keys:
        keys = lax.optimization_barrier(by_head(k))
        return keys, keys
    keys, values = lax.optimization_barrier((by_head(k), by_head(v)))
    return keys, values


def product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """float32 products; exact ones of float32, whatever the platform's default."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)

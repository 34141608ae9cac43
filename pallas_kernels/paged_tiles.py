"""Reads a tile of K and V of one sequence through its block table.

Flow:    pages + block tables + PageRun -> [PagedTiles.read] -> K and V in float32, key positions

Only pages that the run names are read; places of a tile beyond the run read the null page. Pages keep their dtype
until they are gathered: the cost is that of the tile, never of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import page_tokens
from pallas_kernels.key_share import KeyShare
from pallas_kernels.layouts import lane_pieces
from pallas_kernels.mask import PageRun
from pallas_kernels.packed_pages import tokens_of_pages
from pallas_kernels.slab_pages import is_in_slabs

# What is out of bounds is clipped by the gather itself; columns beyond the run are replaced below.
_CLIP = "promise_in_bounds"
_NO_KEY = jnp.iinfo(jnp.int32).max  # position of a slot that holds no key: beyond every `upper`


class PagedReader(Protocol):
    """Pages of one layer and who has them."""

    @property
    def pages(self) -> tuple[jax.Array, ...]:
        """The page arrays."""

    @property
    def block_tables(self) -> jax.Array:
        """int32[S, P]."""

    @property
    def page_size(self) -> int:
        """Keys of a page."""

    @property
    def share(self) -> KeyShare | None:
        """Which tokens the pages hold, where ranks share them; None: all."""

    @property
    def head_dim_v(self) -> int:
        """Dimension of a value."""


class KVTile(NamedTuple):
    """`tile_pages * page_size` slots of one sequence."""

    k: jax.Array  # float32[slots, num_kv_heads, head_dim]
    v: jax.Array  # float32[slots, num_kv_heads, head_dim_v]
    key_pos: jax.Array  # int32[slots]


@dataclass(frozen=True)
class PagedTiles:
    """The pages of one layer."""

    pages: tuple[jax.Array, ...]  # as pallas_kernels.layouts: (k, v) split, or (kv,) packed
    block_tables: jax.Array  # int32[S, P]
    num_kv_heads: int
    head_dim: int
    share: KeyShare | None = None

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return page_tokens(self.pages, self.num_kv_heads)

    @property
    def head_dim_v(self) -> int:
        """Dimension of a value."""
        return self.pages[1].shape[-1] if len(self.pages) == 2 else self.head_dim

    @property
    def values_are_keys(self) -> bool:
        """Values are numbers of their own."""
        return False

    def read(self, seq: jax.Array, run: PageRun, first: jax.Array, tile_pages: int) -> KVTile:
        """The `tile_pages` pages of sequence `seq` from page `first` of its run on; all arguments int32[]."""
        ids, key_pos = locate(self, seq, run, first, tile_pages)
        k, v = self.at_pages(ids)
        return KVTile(_by_slot(k), _by_slot(v), key_pos)

    def keys(self, ids: jax.Array) -> jax.Array:  # int32[n] -> float32[n, slots, num_kv_heads * head_dim]
        """K of whole pages; of split ones in a gather that XLA can merge with what is made of it."""
        if len(self.pages) == 2 and not is_in_slabs(self.pages):
            array = self.pages[0]
            return array.reshape(*array.shape[:2], -1).at[ids].get(mode=_CLIP).astype(jnp.float32)
        k, _ = self.at_pages(ids)
        return k.reshape(*k.shape[:2], -1).astype(jnp.float32)

    def values(self, ids: jax.Array, slot: int) -> jax.Array:  # int32[n] -> float32[n, num_kv_heads, head_dim_v]
        """V of one slot of pages, likewise."""
        if len(self.pages) == 2:
            array = self.pages[1]
            slots = array.at[ids, slot] if is_in_slabs(array) else array[:, slot].at[ids]
            return slots.get(mode=_CLIP).astype(jnp.float32)
        tokens = self.page_size // self.pages[0].shape[1]
        _, v = self._unpacked(self.pages[0].at[ids, slot // tokens].get(mode=_CLIP)[:, None])
        return v[:, slot % tokens].astype(jnp.float32)

    def at_pages(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V [N, page_size, num_kv_heads, dim] of pages `ids` int32[N], in the pages' dtype."""
        if len(self.pages) == 2:
            k, v = (array.at[ids].get(mode=_CLIP) for array in self.pages)
            return k, v
        return self._unpacked(self.pages[0].at[ids].get(mode=_CLIP))

    def _unpacked(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:  # [n, rows of tokens, rows, packing, 128]
        """K and V [n, slots, num_kv_heads, head_dim] each.

        Behind a barrier: XLA for TPU else gives the whole array the layout that suits the heads, in a copy.
        """
        rows = lax.optimization_barrier(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
        tokens = self.page_size // self.pages[0].shape[1]
        heads = tokens_of_pages(rows, tokens, lane_pieces(self.head_dim))[:, :, : 2 * self.num_kv_heads]
        return heads[:, :, 0::2, : self.head_dim], heads[:, :, 1::2, : self.head_dim]


def column_tokens(cache: PagedReader) -> int:
    """Tokens that one column of the block table stands for, on all ranks together."""
    return cache.page_size if cache.share is None else cache.page_size * cache.share.size


def locate(
    cache: PagedReader,
    seq: jax.Array,  # int32[], as are the next ones
    run: PageRun,
    first: jax.Array,
    tile_pages: int,
) -> tuple[jax.Array, jax.Array]:
    """(ids int32[tile_pages], key positions int32[slots]) of the pages of sequence `seq` from page `first` of `run`."""
    i = first + jnp.arange(tile_pages, dtype=jnp.int32)
    column = run.column(i)
    named = i < run.num_pages
    ids = jnp.where(named, cache.block_tables.at[seq, column].get(mode=_CLIP), 0)
    slots = column[:, None] * cache.page_size + jnp.arange(cache.page_size, dtype=jnp.int32)[None]
    positions = slots if cache.share is None else cache.share.position(slots)
    key_pos = jnp.where(named[:, None], positions, _NO_KEY)
    return ids, key_pos.reshape(-1)


def _by_slot(x: jax.Array) -> jax.Array:
    """[tile_pages, page_size, heads, dim] as float32[slots, heads, dim]."""
    return x.astype(jnp.float32).reshape(-1, *x.shape[2:])

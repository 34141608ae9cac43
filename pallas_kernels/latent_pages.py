"""Pages that hold one vector per state (`layouts.latent_layout`), read and written in jnp whatever the platform.

Flow:    latent pages + block tables or slots -> [LatentPages, EntryCache] -> vectors in float32, KV tiles, new pages
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels.key_share import KeyShare
from pallas_kernels.latent_entries import EntryFormat
from pallas_kernels.layouts import KV_CACHE_DTYPES, TPU_LANES, lane_pieces
from pallas_kernels.mask import PageRun
from pallas_kernels.packed_pages import states_of_pages
from pallas_kernels.paged_tiles import KVTile, locate
from pallas_kernels.slab_pages import is_in_slabs
from pallas_kernels.stored_numbers import stored

_CLIP = "promise_in_bounds"


def state_slots(block_tables: jax.Array, page_size: int, seq: jax.Array, state: jax.Array) -> jax.Array:
    """Slots of states number `state` of sequences `seq`, int32[...] each, through `block_tables` int32[S, P]."""
    page = block_tables.at[seq, state // page_size].get(mode=_CLIP)
    return page * page_size + state % page_size


@dataclass(frozen=True)
class LatentPages:
    """The pages of one layer. A slot is `page * page_size + offset`."""

    array: jax.Array  # [pages, page_size, head_dim], or packed [pages, rows, pieces, packing, 128]
    page_size: int  # states of a page
    head_dim: int  # numbers of a state; lanes beyond are padding

    def at_pages(self, ids: jax.Array) -> jax.Array:
        """[N, page_size, head_dim] in the pages' dtype: the states of pages `ids` int32[N]."""
        states = states_of_pages(self.array.at[ids].get(mode=_CLIP))
        return states[:, : self.page_size, : self.head_dim]

    def at_slots(self, slots: jax.Array) -> jax.Array:
        """[..., head_dim] in the pages' dtype: the states in `slots` int32[...], each >= 0."""
        states = self.array.at[self._index(slots)].get(mode=_CLIP)
        return states.reshape(*slots.shape, -1)[..., : self.head_dim]

    def write(self, states: jax.Array, slots: jax.Array, scale: jax.Array | None) -> jax.Array:
        """The array with `states / scale` [N, head_dim] in `slots` int32[N]; slots of page 0 and -1 are skipped."""
        beyond = self.array.shape[0] * self.page_size
        index = self._index(jnp.where(slots < self.page_size, beyond, slots))
        return self.array.at[index].set(self.as_stored(states, scale), mode="drop")

    def as_stored(self, states: jax.Array, scale: jax.Array | None) -> jax.Array:
        """`states / scale` [N, head_dim] in the pages' dtype; packed [N, pieces, 128], zero in padding lanes."""
        rows = states
        if scale is not None or states.dtype != self.array.dtype:
            rows = stored(states[:, None], scale, self.array.dtype)[:, 0]
        if not self._is_packed:
            return rows
        pieces, _, lanes = self.array.shape[2:]
        return jnp.pad(rows, [(0, 0), (0, pieces * lanes - self.head_dim)]).reshape(-1, pieces, lanes)

    @property
    def _is_packed(self) -> bool:
        return self.array.ndim == 5

    def _index(self, slots: jax.Array) -> tuple[Any, ...]:
        page, offset = slots // self.page_size, slots % self.page_size
        if not self._is_packed:
            return page, offset
        packing = self.array.shape[3]
        return page, offset // packing, slice(None), offset % packing


@dataclass(frozen=True)
class LatentTiles:
    """`LatentPages` behind block tables, as one KV head whose values are the first numbers of its keys."""

    latent: LatentPages
    block_tables: jax.Array  # int32[S, P]
    head_dim_v: int
    share: KeyShare | None = None

    @property
    def pages(self) -> tuple[jax.Array, ...]:
        """The page array."""
        return (self.latent.array,)

    @property
    def page_size(self) -> int:
        """States of a page."""
        return self.latent.page_size

    @property
    def values_are_keys(self) -> bool:
        """Values are the first numbers of keys."""
        return True

    def at_pages(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [N, page_size, 1, head_dim] of pages `ids` int32[N] in their dtype, twice: values are parts of them."""
        keys = self.latent.at_pages(ids)[:, :, None]
        return keys, keys

    def read(self, seq: jax.Array, run: PageRun, first: jax.Array, tile_pages: int) -> KVTile:
        """The `tile_pages` pages of sequence `seq` from page `first` of its run on; all arguments int32[]."""
        ids, key_pos = locate(self, seq, run, first, tile_pages)
        k = self.latent.at_pages(ids).astype(jnp.float32).reshape(-1, 1, self.latent.head_dim)
        return KVTile(k, k[..., : self.head_dim_v], key_pos)


@dataclass(frozen=True)
class EntryCache:
    """Latent pages whose states are vectors in a format."""

    latent: LatentPages
    entries: EntryFormat
    dim: int

    @classmethod
    def of(cls, pages: tuple[jax.Array, ...], entries: EntryFormat, dim: int, page_size: int) -> EntryCache:
        """The cache of latent pages that hold vectors of `dim` numbers."""
        return cls(LatentPages(pages[0], page_size, entries.width(dim)), entries, dim)

    def read(self, slots: jax.Array) -> jax.Array:
        """float32[..., dim] in `slots` int32[...]; slots of -1 read the null page."""
        return self.entries.decode(self.latent.at_slots(jnp.maximum(slots, 0)), self.dim)

    def slots(self, block_tables: jax.Array, seq: jax.Array, entry: jax.Array) -> jax.Array:
        """As `state_slots`."""
        return state_slots(block_tables, self.latent.page_size, seq, entry)


def check_latent_pages(op: str, name: str, pages: Any, head_dim: int, page_size: int | None) -> LatentPages:
    """The pages behind the tuple `pages` of one array; `page_size` None means as many states as a page has room for.

    Raises:
        ValueError: they are no latent pages of `head_dim` numbers and `page_size` states.
    """
    if not (isinstance(pages, tuple | list) or is_in_slabs(pages)) or len(pages) != 1:
        raise ValueError(f"{op}: expected {name} to be a tuple (latent,) of one array, got {checks.describe(pages)}")
    array = pages[0]
    if checks.dtype_of(array).name not in KV_CACHE_DTYPES:
        raise ValueError(f"{op}: expected {name} of a dtype out of {KV_CACHE_DTYPES}, got {checks.dtype_of(array)}")
    shape = jnp.shape(array)
    packing = shape[3] if len(shape) == 5 else 1
    packed = (lane_pieces(head_dim), packing, TPU_LANES)
    if len(shape) not in (3, 5) or shape[2:] not in ((head_dim,), packed):
        raise ValueError(
            f"{op}: expected {name}[0] [pages, page_size, {head_dim}] or [pages, rows, {packed[0]}, packing, "
            f"{TPU_LANES}], got {shape}"
        )
    room = shape[1] * packing
    if page_size is None:
        page_size = room
    checks.check_at_least(op, f"page_size of {name}", page_size, 1)
    if not room - packing < page_size <= room:
        raise ValueError(f"{op}: expected page_size of {name} in ({room - packing}, {room}], got {page_size}")
    return LatentPages(array if is_in_slabs(array) else jnp.asarray(array), page_size, head_dim)


def check_entry_pages(
    op: str, name: str, pages: Any, dim: int, entries: EntryFormat, page_size: int | None
) -> LatentPages:
    """As `check_latent_pages`, for pages of vectors of `dim` numbers in the format `entries`.

    Raises:
        ValueError: the format has no such vectors, or the pages do not hold it.
    """
    try:
        width = entries.width(dim)
    except ValueError as error:
        raise ValueError(f"{op}: {name}: {error}") from None
    latent = check_latent_pages(op, name, pages, width, page_size)
    if not entries.fits(latent.array.dtype):
        raise ValueError(f"{op}: expected {name} of dtype int8 for entries {entries}, got {latent.array.dtype}")
    return latent

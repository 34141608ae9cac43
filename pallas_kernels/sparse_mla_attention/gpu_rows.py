"""Rows of two caches on the GPU: gathered one by one into shared memory, then tiled for matrix products.

Flow:    lists of rows + two page arrays -> [RowBlocks.fetch] -> stage -> block [64, D] -> [take_keys, take_values]

A bulk copy of a single row cannot write the swizzled tiles that matrix products read. So rows arrive in a plain *stage*
and the two warpgroups that add values, half of the rows each, move them through registers into the *block*, out of
fp8 by the way; the stage is then free for the next rows, which arrive while this block is attended:

    full     the bulk copies arrive; both adding warpgroups wait
    idle     both have attended the block before, which is overwritten next
    moved    both have moved their half: the block is whole, the stage free; the one that makes scores waits
    weighed  it has made the weights of the block; the adding ones wait

None can wait for ever: the adding ones wait for each other only before they move, the one that makes scores only for
what they do before they need its weights.

Rows that no query sees become 0 on the way, since what stands there may be NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.places import PageNumbers
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.sparse_mla_attention.gpu_entries import RowFormat, RowPlace
from pallas_kernels.sparse_mla_attention.gpu_plan import BLOCK, Field

ADDING = 2  # warpgroups that move rows and add up values; one more fetches and makes weights
_HALF = BLOCK // ADDING


class RowMemory(NamedTuple):
    """Shared memory and barriers of `RowBlocks`."""

    stage: tuple[Any, ...]  # 64 rows
    block: Any  # [64, D]
    weights: Any  # [64, 64]
    shrink: Any  # float32[64] what sums so far are multiplied with
    full: Any
    idle: Any
    moved: Any
    weighed: Any

    @classmethod
    def of(cls, row_format: RowFormat, dim: int, dtype: Any) -> RowMemory:
        """Scratch."""
        return cls(
            stage=row_format.stage(BLOCK),
            block=mosaic.tiled((BLOCK, dim), dtype),
            weights=mosaic.tiled((mosaic.ROWS, BLOCK), dtype),
            shrink=plgpu.SMEM((mosaic.ROWS,), jnp.float32),
            full=plgpu.Barrier(num_arrivals=BLOCK * row_format.num_copies),
            idle=plgpu.Barrier(num_arrivals=ADDING),
            moved=plgpu.Barrier(num_arrivals=ADDING),
            weighed=plgpu.Barrier(),
        )


class TokenLists(NamedTuple):
    """What the tokens of a launch see, and who attends them; as in `SparseWork` but for the lists of picks.

    Arrays, or references to them.
    """

    rows: Any  # int32[n]
    pieces: Any  # int32[pieces, fields]
    blocks: Any  # int32[C, 2]
    picked: Any | None = None  # int32[n] lists of picks; None: `rows` has all lists
    num_picked: Any | None = None  # int32[T] rows of each token's list of picks


class RowPlaces(NamedTuple):
    """Where the rows of a cache lie."""

    page_size: int
    numbers: PageNumbers

    @classmethod
    def of(cls, pages: jax.Array | SlabArray) -> RowPlaces:
        """Those of pages [pages, page_size, width]."""
        return cls(pages.shape[1], PageNumbers.of(pages))

    def at(self, row: jax.Array) -> RowPlace:
        """The place of row `page * page_size + slot`."""
        size = jnp.int32(self.page_size)
        return self.numbers.at(lax.div(row, size), lax.rem(row, size), 0)


class RowCache(NamedTuple):
    """A cache in global memory."""

    views: tuple[Any, ...]  # of the format of its rows
    places: RowPlaces


@dataclass(frozen=True)
class RowBlocks:
    """References of one kernel."""

    format: RowFormat  # of both caches
    lists: TokenLists
    of_windows: RowCache
    of_entries: RowCache
    memory: RowMemory
    warpgroup: Any  # int32[] this one

    def fetch(self, piece: jax.Array, i: jax.Array) -> None:
        """Starts the copies of a piece's `i`-th block, once the stage is free: the block before has been taken."""
        first, in_window = self._place(piece, i)

        entries = self.lists.rows if self.lists.picked is None else self.lists.picked
        pl.when(in_window)(functools.partial(self._copy, self.of_windows, self.lists.rows, first))
        pl.when(jnp.logical_not(in_window))(functools.partial(self._copy, self.of_entries, entries, first))

    def take_keys(self) -> Any:
        """The next block [64, D], ready for the product of scores; call `give_weights` when done with it."""
        self.wait_moved()
        return self.memory.block

    def give_weights(self, weights: jax.Array, shrink: jax.Array) -> None:
        """Hands over the weights [64, 64] of a block, and what sums so far are multiplied with, float32[64]."""
        self.memory.weights[...] = weights
        self.memory.shrink[...] = shrink
        mosaic.fence()
        plgpu.barrier_arrive(self.memory.weighed)

    def take_values(self, piece: jax.Array, i: jax.Array) -> tuple[Any, Any, Any]:
        """(block [64, D], weights [64, 64], `shrink`) of a piece's `i`-th block, until this warpgroup takes more."""
        self.wait_full()
        plgpu.barrier_arrive(self.memory.idle)
        self.wait_idle()
        for reader in range(ADDING):

            @pl.when(self.warpgroup == reader)
            def _(start: int = reader * _HALF) -> None:
                half = pl.ds(start, _HALF)
                self.format.move(
                    self.memory.stage, half, functools.partial(self._seen, piece, i, half), self.memory.block
                )

        mosaic.fence()
        plgpu.barrier_arrive(self.memory.moved)
        self.wait_weighed()
        return self.memory.block, self.memory.weights, self.memory.shrink

    def visible(self, piece: jax.Array, i: jax.Array) -> jax.Array:
        """bool[64, 64], the same for all queries: which rows of a block are seen."""
        rows = self._rows(piece, i, pl.ds(0, BLOCK), mosaic.load_per_column)
        is_row = lax.broadcast_in_dim(rows, (mosaic.ROWS, BLOCK), [1]) >= 0
        return is_row & (mosaic.column_index(mosaic.ROWS, BLOCK) < self._count(piece, i))

    def _seen(self, piece: jax.Array, i: jax.Array, part: pl.Slice, num_columns: int) -> jax.Array:
        """bool[_HALF]: which rows of half a block are any, in the layout of `row_chunks(num_columns)`."""
        layout = mosaic.row_chunks(num_columns).reduce(1)
        rows = self._rows(piece, i, part, lambda x: mosaic.load(x, layout))
        number = mosaic.chunk_row_index(_HALF, num_columns) + part.start
        return (rows >= 0) & (number < self._count(piece, i))

    def _rows(self, piece: jax.Array, i: jax.Array, part: pl.Slice, load: Callable[[Any], jax.Array]) -> jax.Array:
        """int32 rows of a part of a piece's `i`-th block; negative: none."""
        first, in_window = self._place(piece, i)

        def of(lists: Any, first: jax.Array) -> jax.Array:
            return load(lists.at[pl.ds(first + part.start, part.size)])

        if self.lists.picked is None:
            return of(self.lists.rows, first)
        window = of(self.lists.rows, jnp.where(in_window, first, 0))
        picked = of(self.lists.picked, jnp.where(in_window, 0, first))
        return picked + (window - picked) * in_window.astype(jnp.int32)

    def _place(self, piece: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(where the rows of a piece's `i`-th block begin, whether they are the window's)."""
        number, in_window, number_of_entries = self._number(piece, i)
        window = self.lists.pieces[piece, Field.WINDOW] + number * BLOCK
        entries = self.lists.pieces[piece, Field.ENTRIES] + number_of_entries * BLOCK
        return pl.multiple_of(jnp.where(in_window, window, entries), BLOCK), in_window

    def _count(self, piece: jax.Array, i: jax.Array) -> jax.Array:
        """Rows of a block before the end of its list; those of a window end with its -1."""
        _, in_window, number = self._number(piece, i)
        return jnp.where(in_window, BLOCK, self.lists.pieces[piece, Field.NUM_ENTRIES] - number * BLOCK)

    def _number(self, piece: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(number of a block, whether it is the window's, its number among those of the entries)."""
        number, window = self.lists.pieces[piece, Field.FIRST] + i, self.lists.pieces[piece, Field.WINDOW_BLOCKS]
        return number, number < window, number - window

    def _copy(self, cache: RowCache, lists: Any, first: jax.Array) -> None:
        def row(number: int) -> RowPlace:
            return cache.places.at(lax.max(lists[first + number], jnp.int32(0)))

        def start(number: int, row: RowPlace) -> None:
            self.format.copy(cache.views, row, self.memory.stage, number, self.memory.full)

        mosaic.start_copies(BLOCK, start, row)

    def wait_full(self) -> None:
        """Waits until the rows have arrived."""
        plgpu.barrier_wait(self.memory.full)

    def wait_idle(self) -> None:
        """Waits until both warpgroups have attended the block before."""
        plgpu.barrier_wait(self.memory.idle)

    def wait_moved(self) -> None:
        """Waits until both warpgroups have moved their half."""
        plgpu.barrier_wait(self.memory.moved)

    def wait_weighed(self) -> None:
        """Waits until the weights of the block have been made."""
        plgpu.barrier_wait(self.memory.weighed)

"""Rows of two caches on the GPU: gathered one by one into shared memory, then tiled for matrix products.

Flow:    lists of rows + two page arrays -> [RowBlocks.fetch] -> stage -> [RowBlocks.take] -> block [64, D]

A bulk copy of a single row cannot write the swizzled tiles that matrix products read. So rows arrive in a plain *stage*
and both warpgroups, half of the rows each, move them through registers into the *block*; the stage is then free for the
next rows, which arrive while this block is attended:

    full    the bulk copies arrive; both warpgroups wait
    idle    both have attended the block before, which is overwritten next
    moved   both have moved their half: the block is whole, the stage free

Rows that no query sees become 0 on the way, since what stands there may be NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.sparse_mla_attention.gpu_plan import BLOCK, Field

WARPGROUPS = 2
CHUNK = mosaic_gpu.ROW_CHUNK  # numbers of a row that are moved at once
_ROWS_AT_ONCE = 8  # whose numbers are read before their copies start
_HALF = BLOCK // WARPGROUPS


@dataclass(frozen=True)
class RowBlocks:
    """References of one kernel."""

    rows: Any  # int32[n] of `SparseWork`, in global memory
    pieces: Any  # int32[pieces, fields]
    pages: Any  # [rows of the window cache, D / 128, 128]
    entry_pages: Any  # [rows of the compressed cache, D / 128, 128]
    stage: Any  # [64, D / 128, 128] shared memory
    block: Any  # [64, D]
    full: Any
    idle: Any
    moved: Any
    warpgroup: Any  # int32[] this one

    @classmethod
    def of(cls, references: dict[str, Any], warpgroup: Any) -> RowBlocks:
        """Among a kernel's references by name."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in references.items() if name in names}, warpgroup=warpgroup)

    @classmethod
    def scratch(cls, dim: int, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers by field."""
        return {
            "stage": plgpu.SMEM((BLOCK, dim // CHUNK, CHUNK), dtype),
            "block": mosaic_gpu.tiled((BLOCK, dim), dtype),
            "full": plgpu.Barrier(num_arrivals=BLOCK),
            "idle": plgpu.Barrier(num_arrivals=WARPGROUPS),
            "moved": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }

    def fetch(self, piece: jax.Array, i: jax.Array) -> None:
        """Starts the copies of this warpgroup's half of a piece's `i`-th block."""
        first, in_window = self._place(piece, i)
        first = first + self.warpgroup * _HALF
        pl.when(in_window)(functools.partial(self._copy, self.pages, first))
        pl.when(jnp.logical_not(in_window))(functools.partial(self._copy, self.entry_pages, first))

    def take(self, piece: jax.Array, i: jax.Array) -> Any:
        """A piece's `i`-th block [64, D], ready for products; it stays until this warpgroup takes the next."""
        self.wait_full()
        plgpu.barrier_arrive(self.idle)
        self.wait_idle()
        first, _ = self._place(piece, i)
        for reader in range(WARPGROUPS):

            @pl.when(self.warpgroup == reader)
            def _(start: int = reader * _HALF) -> None:
                half = pl.ds(start, _HALF)
                rows = mosaic_gpu.load(self.rows.at[pl.ds(first + start, _HALF)], mosaic_gpu.PER_ROW_OF_CHUNKS)
                seen = (rows >= 0) & (mosaic_gpu.chunk_row_index(_HALF) + start < self._count(piece, i))
                for chunk in range(self.stage.shape[1]):
                    values = mosaic_gpu.load(self.stage.at[half, chunk], mosaic_gpu.ROW_CHUNKS)
                    keep = mosaic_gpu.spread(seen, CHUNK)
                    self.block[half, pl.ds(chunk * CHUNK, CHUNK)] = jnp.where(keep, values, jnp.zeros_like(values))

        mosaic_gpu.fence()
        plgpu.barrier_arrive(self.moved)
        self.wait_moved()
        return self.block

    def visible(self, piece: jax.Array, i: jax.Array) -> jax.Array:
        """bool[64, 64], the same for all queries: which rows of a block are seen."""
        first, _ = self._place(piece, i)
        rows = mosaic_gpu.load_per_column(self.rows.at[pl.ds(first, BLOCK)])
        is_row = lax.broadcast_in_dim(rows, (mosaic_gpu.ROWS, BLOCK), [1]) >= 0
        return is_row & (mosaic_gpu.column_index(mosaic_gpu.ROWS, BLOCK) < self._count(piece, i))

    def _place(self, piece: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(where the rows of a piece's `i`-th block begin, whether they are the window's)."""
        number, in_window, number_of_entries = self._number(piece, i)
        window = self.pieces[piece, Field.WINDOW] + number * BLOCK
        entries = self.pieces[piece, Field.ENTRIES] + number_of_entries * BLOCK
        return pl.multiple_of(jnp.where(in_window, window, entries), BLOCK), in_window

    def _count(self, piece: jax.Array, i: jax.Array) -> jax.Array:
        """Rows of a block before the end of its list; those of a window end with its -1."""
        _, in_window, number = self._number(piece, i)
        return jnp.where(in_window, BLOCK, self.pieces[piece, Field.NUM_ENTRIES] - number * BLOCK)

    def _number(self, piece: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(number of a block, whether it is the window's, its number among those of the entries)."""
        number, window = self.pieces[piece, Field.FIRST] + i, self.pieces[piece, Field.WINDOW_BLOCKS]
        return number, number < window, number - window

    def _copy(self, pages: Any, first: jax.Array) -> None:
        @pl.loop(0, _HALF, step=_ROWS_AT_ONCE)
        def _(start: jax.Array) -> None:
            rows = [lax.max(self.rows[first + start + j], jnp.int32(0)) for j in range(_ROWS_AT_ONCE)]
            for j, row in enumerate(rows):
                place = self.warpgroup * _HALF + start + j
                plgpu.copy_gmem_to_smem(pages.at[row], self.stage.at[place], self.full)

    def wait_full(self) -> None:
        """Waits until the rows have arrived."""
        plgpu.barrier_wait(self.full)

    def wait_idle(self) -> None:
        """Waits until both warpgroups have attended the block before."""
        plgpu.barrier_wait(self.idle)

    def wait_moved(self) -> None:
        """Waits until both warpgroups have moved their half."""
        plgpu.barrier_wait(self.moved)

"""Sparse latent attention on the GPU: query tiles of one token, over rows that are gathered one by one.

Flow:    query tiles, two page arrays + SparseWork -> [attend_pieces] -> out, LSE per piece
Source:  one softmax over two caches by lists of rows, as FlashMLA's sparse kernels (deepseek-ai/FlashMLA)

Grid (C,): each thread block attends its pieces one after the other. As in mla_paged_attention, two warpgroups make the
same 64 scores a row and share the columns of the values. Per block of 64 rows of D numbers a tile reads 64 * D elements
and does 2 * 64 * 64 * 3 * D flops, of which 2 / 3 count, times heads / 64.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.mla_paged_attention.gpu_attend import store_piece
from pallas_kernels.ragged_paged_attention.gpu_softmax import RowState, add_scores
from pallas_kernels.sparse_mla_attention.gpu_plan import Field, SparseWork
from pallas_kernels.sparse_mla_attention.gpu_rows import CHUNK, WARPGROUPS, RowBlocks


def attend_pieces(
    q: jax.Array,  # [tiles, rows, D] rows a multiple of 8: heads
    pages: jax.Array,  # [pages, page_size, D]
    entry_pages: jax.Array,  # [pages, page_size, D]
    work: SparseWork,
    sinks: jax.Array,  # float32[parts, 64] natural-log logits of the heads of a tile, -inf: none
    scale: jax.Array,  # float32[1] sm_scale * log2(e)
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out [pieces, 64, D], natural-log LSE float32[pieces, 64]); 0 and -inf where a piece sees nothing."""
    num_pieces, dim = work.pieces.shape[0], q.shape[-1]
    outputs = [
        jax.ShapeDtypeStruct((num_pieces, mosaic_gpu.ROWS, dim), out_dtype),
        jax.ShapeDtypeStruct((num_pieces, mosaic_gpu.ROWS), jnp.float32),
    ]
    scratch = {
        "q_tile": mosaic_gpu.tiled((mosaic_gpu.ROWS, dim), q.dtype),
        "lse_tile": plgpu.SMEM((mosaic_gpu.ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "q_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
        **RowBlocks.scratch(dim, q.dtype),
    }
    names = ("q", "pages", "entry_pages", "rows", "pieces", "blocks", "sinks", "scale", "out", "lse", *scratch)

    def body(*args: Any) -> None:
        refs = SimpleNamespace(**dict(zip(names, args, strict=True)))
        warpgroup = lax.axis_index("warpgroup")
        _attend(refs, RowBlocks.of(vars(refs), warpgroup), warpgroup)

    run = mosaic_gpu.kernel(
        body,
        name=f"sparse_mla_h{q.shape[1]}",
        outputs=outputs,
        scratch=list(scratch.values()),
        grid={"block": work.blocks.shape[0]},
        num_warpgroups=WARPGROUPS,
    )
    by_row = [array.reshape(-1, dim // CHUNK, CHUNK) for array in (pages, entry_pages)]
    out, lse = run(q, *by_row, work.rows, work.pieces, work.blocks, sinks, scale)
    return out, lse


def _attend(refs: Any, row_blocks: RowBlocks, warpgroup: jax.Array) -> None:
    """One warpgroup's part of all pieces of this thread block."""
    block = lax.axis_index("block")
    first, end = refs.blocks[block, 0], refs.blocks[block, 1]
    columns = refs.q.shape[-1] // WARPGROUPS
    own = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns)

    @pl.loop(first, end)
    def _(piece: jax.Array) -> None:
        @pl.when(warpgroup == 0)
        def _() -> None:
            pl.when(piece > first)(lambda: plgpu.barrier_wait(refs.q_free))
            target = refs.q_tile.at[pl.ds(0, refs.q.shape[1])]
            plgpu.copy_gmem_to_smem(refs.q.at[refs.pieces[piece, Field.TILE]], target, refs.q_full)

        num_blocks = refs.pieces[piece, Field.END] - refs.pieces[piece, Field.FIRST]
        pl.when(num_blocks > 0)(lambda: row_blocks.fetch(piece, jnp.int32(0)))
        plgpu.barrier_wait(refs.q_full)

        def attend_block(i: jax.Array, state: RowState) -> RowState:
            rows = row_blocks.take(piece, i)
            pl.when(i + 1 < num_blocks)(lambda: row_blocks.fetch(piece, i + 1))
            scores = mosaic_gpu.dot_transposed(refs.q_tile, rows) * refs.scale[0]
            scores = jnp.where(row_blocks.visible(piece, i), scores, -jnp.inf)
            state, p = add_scores(state, scores, refs.q.dtype)
            return state._replace(total=mosaic_gpu.dot_add(state.total, p, rows.at[:, own]))

        state = lax.fori_loop(0, num_blocks, attend_block, RowState.empty(columns))
        plgpu.barrier_arrive(refs.q_free)
        part = lax.rem(refs.pieces[piece, Field.TILE], jnp.int32(refs.sinks.shape[0]))
        store_piece(refs, piece, warpgroup, *state.finish_with_sinks(mosaic_gpu.load_per_row(refs.sinks.at[part])))

    @pl.when(warpgroup == 0)
    def _() -> None:
        pl.when(end > first)(lambda: plgpu.barrier_wait(refs.q_free))
        plgpu.wait_smem_to_gmem(0)

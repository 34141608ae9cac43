"""Sparse latent attention on the GPU: query tiles of one token, over rows that are gathered one by one.

Flow:    query tiles, two page arrays + TokenLists -> [attend_pieces] -> out, LSE per piece
Source:  one softmax over two caches by lists of rows, as FlashMLA's sparse kernels (deepseek-ai/FlashMLA)

Grid (C,): each thread block attends its pieces one after the other. As in mla_paged_attention, a warpgroup fetches and
makes weights, two share the columns of the values. Per block of 64 rows of D numbers a tile reads these, each by a bulk
copy of its own or, in fp8, by three, and does 2 * 64 * 64 * 2 * D flops, of which heads / 64 count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.call import call
from pallas_kernels.gpu.handover import give_share, store_columns, take_share
from pallas_kernels.gpu.softmax import RowState, add_scores, row_sinks
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.sparse_mla_attention.gpu_entries import RowFormat
from pallas_kernels.sparse_mla_attention.gpu_plan import BLOCK, Field
from pallas_kernels.sparse_mla_attention.gpu_rows import ADDING, RowBlocks, RowCache, RowMemory, RowPlaces, TokenLists


class Caches(NamedTuple):
    """Where rows are gathered from."""

    pages: jax.Array | SlabArray  # [pages, page_size, width] of windows
    entry_pages: jax.Array | SlabArray  # [pages, page_size, width]
    row_format: RowFormat  # of both


def attend_pieces(
    q: jax.Array,  # [tiles, rows, D] rows a multiple of 8: heads
    caches: Caches,
    lists: TokenLists,
    sinks: jax.Array,  # float32[1 or Hq] natural-log logits, -inf: none
    scale: jax.Array,  # float32[1] sm_scale * log2(e)
    heads: int,  # of a tile
    parts: int,  # tiles of a token
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out [pieces, 64, D], natural-log LSE float32[pieces, 64]); 0 and -inf where a piece sees nothing."""
    num_pieces, dim, row_format = lists.pieces.shape[0], q.shape[-1], caches.row_format
    row = plgpu.SMEM((mosaic.ROWS,), jnp.float32)
    places = (RowPlaces.of(caches.pages), RowPlaces.of(caches.entry_pages))

    def body(refs: _Refs) -> None:
        warpgroup = lax.axis_index("warpgroup")
        of_windows, of_entries = RowCache(refs.pages, places[0]), RowCache(refs.entry_pages, places[1])
        row_blocks = RowBlocks(row_format, refs.lists, of_windows, of_entries, refs.row_memory, warpgroup)
        pl.when(warpgroup < ADDING)(lambda: _add_values(refs, parts, row_blocks, warpgroup))
        pl.when(warpgroup == ADDING)(lambda: _make_weights(refs, heads, parts, row_blocks))

    results = call(
        body,
        _Refs,
        name=f"sparse_mla_h{q.shape[1]}",
        grid={"block": lists.blocks.shape[0]},
        inputs={
            "entry_pages": row_format.views(caches.entry_pages),
            "pages": row_format.views(caches.pages),
            "q": q,
            "lists": lists,
            "scale": scale,
            "sinks": sinks,
        },
        outputs={
            "out": jax.ShapeDtypeStruct((num_pieces, mosaic.ROWS, dim), out_dtype),
            "lse": jax.ShapeDtypeStruct((num_pieces, mosaic.ROWS), jnp.float32),
        },
        scratch={
            "row_memory": RowMemory.of(row_format, dim, q.dtype),
            "q_tile": mosaic.tiled((mosaic.ROWS, dim), q.dtype),
            "lse_tile": row,
            "share": row,
            "q_full": plgpu.Barrier(),
            "done": plgpu.Barrier(),
            "stored": plgpu.Barrier(num_arrivals=ADDING),
        },
        num_warpgroups=ADDING + 1,
    )
    return results["out"], results["lse"]


class _Refs(NamedTuple):
    """References of a thread block."""

    q: Any  # [tiles, rows, D]
    lists: TokenLists
    sinks: Any  # float32[1 or Hq]
    scale: Any  # float32[1]
    pages: tuple[Any, ...]  # views of the window cache
    entry_pages: tuple[Any, ...]  # views of the compressed cache
    out: Any  # [pieces, 64, D]
    lse: Any  # float32[pieces, 64]
    q_tile: Any  # [64, D]
    lse_tile: Any  # float32[64], as is the next one
    share: Any
    q_full: Any  # barrier: the queries have arrived; the next two are those of `handover`
    done: Any
    stored: Any
    row_memory: RowMemory


def _range(refs: _Refs) -> tuple[jax.Array, jax.Array]:
    """This thread block's pieces: first, and one after the last."""
    block = lax.axis_index("block")
    return refs.lists.blocks[block, 0], refs.lists.blocks[block, 1]


def _num_blocks(refs: _Refs, parts: int, piece: jax.Array) -> jax.Array:
    """Blocks of a piece, up to the end of its token's list of picks."""
    end = refs.lists.pieces[piece, Field.END]
    if refs.lists.num_picked is not None:
        num_picked = refs.lists.num_picked[lax.div(refs.lists.pieces[piece, Field.TILE], jnp.int32(parts))]
        last = refs.lists.pieces[piece, Field.WINDOW_BLOCKS] + lax.div(num_picked + (BLOCK - 1), jnp.int32(BLOCK))
        end = lax.min(end, last)
    return lax.max(end - refs.lists.pieces[piece, Field.FIRST], jnp.int32(0))


def _make_weights(refs: _Refs, heads: int, parts: int, row_blocks: RowBlocks) -> None:
    """The warpgroup that fetches, and makes scores and weights, of all pieces."""
    first, end = _range(refs)

    @pl.loop(first, end)
    def _(piece: jax.Array) -> None:
        target = refs.q_tile.at[pl.ds(0, refs.q.shape[1])]
        plgpu.copy_gmem_to_smem(refs.q.at[refs.lists.pieces[piece, Field.TILE]], target, refs.q_full)
        num_blocks = _num_blocks(refs, parts, piece)
        pl.when(num_blocks > 0)(lambda: row_blocks.fetch(piece, jnp.int32(0)))
        plgpu.barrier_wait(refs.q_full)

        def attend_block(i: jax.Array, state: RowState) -> RowState:
            def fetch_next() -> None:
                pl.when(i + 1 < num_blocks)(lambda: row_blocks.fetch(piece, i + 1))

            scores = mosaic.dot_transposed(refs.q_tile, row_blocks.take_keys(), fetch_next) * refs.scale[0]
            scores = jnp.where(row_blocks.visible(piece, i), scores, -jnp.inf)
            before = state.m
            state, p = add_scores(state, scores, refs.q.dtype)
            row_blocks.give_weights(p, jnp.exp2(before - jnp.where(state.m == -jnp.inf, 0.0, state.m)))
            return state

        state = lax.fori_loop(0, num_blocks, attend_block, RowState.empty(None))
        part = lax.rem(refs.lists.pieces[piece, Field.TILE], jnp.int32(parts))
        sinks = row_sinks(refs.sinks, part, heads)
        give_share(refs, piece, piece > first, *state.finish_weight_with_sinks(sinks))

    pl.when(end > first)(lambda: plgpu.barrier_wait(refs.stored))
    plgpu.wait_smem_to_gmem(0)


def _add_values(refs: _Refs, parts: int, row_blocks: RowBlocks, warpgroup: jax.Array) -> None:
    """One of the warpgroups that move rows and add up values: its columns of all pieces."""
    first, end = _range(refs)
    columns = refs.q.shape[-1] // ADDING
    own = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns)

    @pl.loop(first, end)
    def _(piece: jax.Array) -> None:
        def add_block(i: jax.Array, total: jax.Array) -> jax.Array:
            rows, weights, shrink = row_blocks.take_values(piece, i)
            total = total * mosaic.spread(mosaic.load_per_row(shrink), columns)
            return mosaic.dot_add(total, weights, rows.at[:, own])

        total = mosaic.matrix(jnp.zeros((mosaic.ROWS, columns), jnp.float32))
        total = lax.fori_loop(0, _num_blocks(refs, parts, piece), add_block, total)
        store_columns(refs.out, piece, warpgroup, total * mosaic.spread(take_share(refs), columns))

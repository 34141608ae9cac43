"""Latent attention of query tiles of 64 rows on the GPU: one warpgroup makes scores, two add half of the values each.

Flow:    packed query tiles, latent pages, tables + LatentSchedule -> [attend_pieces] -> out, LSE per piece
Source:  absorbed decoding as FlashMLA (deepseek-ai/FlashMLA): a latent is key and value, warpgroups share the values

Grid (C,): each thread block attends its pieces one after the other. A tile's accumulated values, 64 x 512 in float32,
fill the registers of two warpgroups. The third one fetches, makes the scores of a block and their softmax while the
other two multiply the weights of the block before with its values. It hands the weights over in shared memory, in the
place of the block's rotated keys, which only its own product reads. Per block of 64 latents of D numbers a tile reads
64 * D elements and does 2 * 64 * 64 * (D + Dl) flops.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.call import call
from pallas_kernels.gpu.handover import give_share, store_columns, take_share
from pallas_kernels.gpu.places import PageView
from pallas_kernels.gpu.plan import Field, GpuConfig, Keys
from pallas_kernels.gpu.softmax import (
    LARGEST,
    RowBounds,
    RowState,
    row_sinks,
    seen_by_any,
    weigh,
)
from pallas_kernels.mla_paged_attention.gpu_latents import ADDING, LatentMemory, LatentRing
from pallas_kernels.mla_paged_attention.gpu_schedule import LatentSchedule


def fixed_bytes(head_dim: int) -> int:
    """Shared memory apart from latents: queries, values per row, barriers and gaps before aligned arrays."""
    return mosaic.ROWS * 2 * head_dim + 4096


def attend_pieces(
    q: jax.Array,  # [U, rows, D] in the compute dtype, rows a multiple of 8: query tiles, row = token * heads + head
    pages: PageView,  # entries [D]
    block_tables: jax.Array,  # int32[S, P]
    work: LatentSchedule,
    scale: jax.Array,  # float32[1] of the latents
    sinks: jax.Array,  # float32[1 or Hq], -inf: none
    config: GpuConfig,  # group: heads of a tile
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(out float32[split pieces, 64, Dl], natural-log LSE float32[pieces, 64], out [other pieces, 64, Dl] or None).

    Pieces of split keys are without sinks, which their merge adds. Rows beyond those of a tile are undefined, and what
    is of no thread block.
    """
    num_tokens = 1 if work.queries is None else work.sizes.tile.tokens
    num_tiles = work.pieces.shape[0] - work.num_split
    shape = (mosaic.ROWS, config.head_dim_v)
    row, tile_out = plgpu.SMEM((mosaic.ROWS,), jnp.float32), None
    if num_tiles:
        tile_out = jax.ShapeDtypeStruct((num_tiles, *shape), out_dtype)

    def body(refs: _Refs) -> None:
        warpgroup = lax.axis_index("warpgroup")
        ring = LatentRing(config, refs.tables, refs.pages, pages.places, refs.ring, warpgroup)
        pl.when(warpgroup < ADDING)(lambda: _add_values(refs, ring, work.sizes.num_blocks, warpgroup))
        pl.when(warpgroup == ADDING)(lambda: _make_weights(refs, ring, num_tokens, work.sizes.num_blocks))

    results = call(
        body,
        _Refs,
        name=f"mla_p{config.page_size}_t{num_tokens}",
        grid={"block": work.blocks.shape[0]},
        inputs={
            "q": q,
            "pages": pages.entries,
            "tables": block_tables,
            "pieces": work.pieces,
            "tiles": work.tiles,
            "blocks": work.blocks,
            "scale": scale,
            "sinks": sinks,
        },
        outputs={
            "out": jax.ShapeDtypeStruct((work.num_split, *shape), jnp.float32),
            "lse": jax.ShapeDtypeStruct((work.pieces.shape[0], mosaic.ROWS), jnp.float32),
            "tile_out": tile_out,
        },
        scratch={
            "q_tile": mosaic.tiled((mosaic.ROWS, config.head_dim), config.compute_dtype),
            "lse_tile": row,
            "share": row,
            "q_full": plgpu.Barrier(),
            "done": plgpu.Barrier(),
            "stored": plgpu.Barrier(num_arrivals=ADDING),
            "ring": LatentMemory.of(config),
        },
        num_warpgroups=ADDING + 1,
    )
    return results["out"], results["lse"], results["tile_out"]


class _Refs(NamedTuple):
    """References of a thread block."""

    q: Any  # [U, rows, D]
    pages: Any  # [states, D]
    tables: Any  # int32[S, P]
    pieces: Any  # int32[pieces, fields]
    tiles: Any  # int32[pieces]
    blocks: Any  # int32[C, 2]
    scale: Any  # float32[1]
    sinks: Any  # float32[1 or Hq]
    out: Any  # float32[split pieces, 64, Dl]
    lse: Any  # float32[pieces, 64]
    tile_out: Any | None  # [other pieces, 64, Dl]
    q_tile: Any  # [64, D]
    lse_tile: Any  # float32[64], as is the next one
    share: Any
    q_full: Any  # barrier: the queries have arrived; the next two are those of `handover`
    done: Any
    stored: Any
    ring: LatentMemory


def _range(refs: _Refs) -> tuple[jax.Array, jax.Array]:
    """This thread block's pieces: first, and one after the last."""
    block = lax.axis_index("block")
    return refs.blocks[block, 0], refs.blocks[block, 1]


def _make_weights(refs: _Refs, ring: LatentRing, num_tokens: int, num_split_blocks: int) -> None:
    """The warpgroup that fetches, and makes scores and weights, of all pieces."""
    first, end = _range(refs)
    config, ahead = ring.config, ring.config.stages - 1
    scale = refs.scale[0] * config.score_factor

    def weigh_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        keys = Keys.of_piece(refs.pieces, piece)

        def fetch(i: Any) -> None:
            """Starts the copies of the piece's `i`-th block."""
            own = Keys.of_piece(refs.pieces, piece)
            seq = refs.pieces[piece, Field.SEQ]
            pl.when(i < own.num_blocks)(lambda: ring.fetch(step + i, seq, own, own.block(i)))

        target = refs.q_tile.at[pl.ds(0, refs.q.shape[1])]
        plgpu.copy_gmem_to_smem(refs.q.at[refs.tiles[piece]], target, refs.q_full)
        for i in range(ahead):
            fetch(jnp.int32(i))
        plgpu.barrier_wait(refs.q_full)

        def attend_block(i: jax.Array, state: RowState, bounds: RowBounds | None) -> RowState:
            keys = Keys.of_piece(refs.pieces, piece)
            latents = ring.take_keys(step + i)
            # The slot to fill is that of the block before, whose values the others add without waiting for this one.
            products = mosaic.dot_transposed(refs.q_tile, latents, meanwhile=lambda: fetch(i + ahead))
            first_slot = keys.block(i) * config.block
            before = state.m
            state, p = weigh(state, products * scale, config, keys, bounds, first_slot)
            ring.give_weights(step + i, p, jnp.exp2(before - jnp.where(state.m == -jnp.inf, 0.0, state.m)))
            return state

        def whole(i: jax.Array, state: RowState) -> RowState:
            return attend_block(i, state, None)

        def cut(i: jax.Array, state: RowState) -> RowState:
            return attend_block(i, state, _bounds(refs, config, piece, num_tokens))

        state = lax.fori_loop(0, keys.num_whole, whole, RowState.empty(None))
        state = lax.fori_loop(keys.num_whole, keys.num_blocks, cut, state)
        give_share(refs, piece, piece > first, *_finish(refs, config, piece, state, num_split_blocks))
        return step + keys.num_blocks

    num_steps = lax.fori_loop(first, end, weigh_piece, jnp.int32(0))
    pl.when(end > first)(lambda: plgpu.barrier_wait(refs.stored))
    ring.drain(num_steps)
    plgpu.wait_smem_to_gmem(0)


def _finish(
    refs: _Refs, config: GpuConfig, piece: jax.Array, state: RowState, num_split_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """(what the sums of a piece are multiplied with, LSE), with sinks where its keys are not split."""
    if refs.tile_out is None:
        return state.finish_weight()
    largest = jnp.where(_is_split(num_split_blocks), -jnp.inf, LARGEST)
    return state.finish_weight_with_sinks(row_sinks(refs.sinks, refs.pieces[piece, Field.HEAD], config.group, largest))


def _is_split(num_split_blocks: int) -> jax.Array:
    """Whether this thread block's pieces are of split keys: the first ones' are."""
    return lax.axis_index("block") < num_split_blocks


def _add_values(refs: _Refs, ring: LatentRing, num_split_blocks: int, warpgroup: jax.Array) -> None:
    """One of the warpgroups that add up values: its columns of all pieces."""
    first, end = _range(refs)
    config = ring.config
    columns = config.head_dim_v // ADDING
    own = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns)

    def add_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        keys = Keys.of_piece(refs.pieces, piece)

        def add_block(i: jax.Array, total: jax.Array, is_cut: bool) -> jax.Array:
            keys = Keys.of_piece(refs.pieces, piece)
            seen = seen_by_any(config, keys, keys.block(i) * config.block) if is_cut else None
            latents, weights, shrink = ring.take_values(step + i, seen)
            total = total * mosaic.spread(mosaic.load_per_row(shrink), columns)
            total = mosaic.dot_add(total, weights, latents.at[:, own])
            ring.release(step + i)
            return total

        total = mosaic.matrix(jnp.zeros((mosaic.ROWS, columns), jnp.float32))
        total = lax.fori_loop(0, keys.num_whole, functools.partial(add_block, is_cut=False), total)
        total = lax.fori_loop(keys.num_whole, keys.num_blocks, functools.partial(add_block, is_cut=True), total)
        out = total * mosaic.spread(take_share(refs), columns)
        _store_columns(refs, piece, warpgroup, out, num_split_blocks)
        return step + keys.num_blocks

    lax.fori_loop(first, end, add_piece, jnp.int32(0))


def _bounds(refs: _Refs, config: GpuConfig, piece: jax.Array, num_tokens: int) -> RowBounds:
    """What each row sees; rows beyond the tile's see what its last token does."""
    if num_tokens == 1:
        keys = Keys.of_piece(refs.pieces, piece)
        return RowBounds(keys.lower, keys.upper)
    token = lax.div(mosaic.row_index(mosaic.ROWS), jnp.int32(config.group))
    pos = lax.min(token, jnp.int32(num_tokens - 1)) + refs.pieces[piece, Field.POS]
    return RowBounds(config.mask.lower(pos), config.mask.upper(pos, refs.pieces[piece, Field.SEQ_LEN]))


def _store_columns(refs: _Refs, piece: jax.Array, warpgroup: jax.Array, out: jax.Array, num_split_blocks: int) -> None:
    """Stores a warpgroup's columns with pieces of their kind."""
    if refs.tile_out is None:
        store_columns(refs.out, piece, warpgroup, out)
        return
    is_split, tile_out = _is_split(num_split_blocks), refs.tile_out
    pl.when(~is_split)(lambda: store_columns(tile_out, piece - refs.out.shape[0], warpgroup, out))
    pl.when(is_split)(lambda: store_columns(refs.out, piece, warpgroup, out))

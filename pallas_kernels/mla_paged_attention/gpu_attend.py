"""Latent attention of query tiles of 64 rows on the GPU, two warpgroups, each with half of the values' columns.

Flow:    packed query tiles, latent pages, tables + LatentSchedule -> [attend_pieces] -> out, LSE per piece
Source:  absorbed decoding as FlashMLA (deepseek-ai/FlashMLA): a latent is key and value, warpgroups share the values

Grid (C,): each thread block attends its pieces one after the other. Both warpgroups make the same 64 scores a row: a
tile's accumulated values, 64 x 512 in float32, fill the registers of two. The first also fetches, a block ahead: with a
warpgroup for that alone, the others would have too few registers. Per block of 64 latents of D numbers a tile reads
64 * D elements and does 2 * 64 * 64 * (2 * D + Dl) flops, of which D count once.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.mla_paged_attention.gpu_latents import WARPGROUPS, LatentRing
from pallas_kernels.mla_paged_attention.gpu_schedule import LatentSchedule, LatentSizes
from pallas_kernels.ragged_paged_attention.gpu_plan import Field, GpuConfig, Keys
from pallas_kernels.ragged_paged_attention.gpu_softmax import RowBounds, RowState, seen_by_any, weigh

POS, SEQ_LEN = len(Field), len(Field) + 1  # columns of a piece beyond `Field`: of the tile's first query


def fixed_bytes(head_dim: int) -> int:
    """Shared memory apart from latents: queries, barriers and gaps before aligned arrays."""
    return mosaic_gpu.ROWS * 2 * head_dim + 2048


def attend_pieces(
    q: jax.Array,  # [U, rows, D] in the compute dtype, rows a multiple of 8: query tiles, row = token * heads + head
    pages: jax.Array,  # [pages, page_size, D]
    block_tables: jax.Array,  # int32[S, P]
    work: LatentSchedule,
    scale: jax.Array,  # float32[1] of the latents
    config: GpuConfig,  # group: heads of a tile
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(out float32[split pieces, 64, Dl], natural-log LSE float32[pieces, 64], out [other pieces, 64, Dl] or None).

    Rows beyond those of a tile are undefined, and what is of no thread block.
    """
    num_tokens = 1 if work.queries is None else work.sizes.tile.tokens
    num_tiles = work.pieces.shape[0] - work.num_split
    shape = (mosaic_gpu.ROWS, config.head_dim_v)
    outputs = [
        jax.ShapeDtypeStruct((work.num_split, *shape), jnp.float32),
        jax.ShapeDtypeStruct((work.pieces.shape[0], mosaic_gpu.ROWS), jnp.float32),
    ]
    if num_tiles:
        outputs.append(jax.ShapeDtypeStruct((num_tiles, *shape), out_dtype))
    scratch = {
        "q_tile": mosaic_gpu.tiled((mosaic_gpu.ROWS, config.head_dim), config.compute_dtype),
        "lse_tile": plgpu.SMEM((mosaic_gpu.ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "q_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
        **LatentRing.scratch(config),
    }
    results = ("out", "lse", "tile_out")[: len(outputs)]
    names = ("q", "pages", "tables", "pieces", "tiles", "blocks", "scale", *results, *scratch)

    def body(*args: Any) -> None:
        refs = SimpleNamespace(**dict(zip(names, args, strict=True)))
        warpgroup = lax.axis_index("warpgroup")
        _attend(refs, LatentRing.of(config, vars(refs), warpgroup), work.sizes, num_tokens, warpgroup)

    run = mosaic_gpu.kernel(
        body,
        name=f"mla_p{config.page_size}_t{num_tokens}",
        outputs=outputs,
        scratch=list(scratch.values()),
        grid={"block": work.blocks.shape[0]},
        num_warpgroups=WARPGROUPS,
    )
    out, lse, *of_tiles = run(q, pages, block_tables, work.pieces, work.tiles, work.blocks, scale)
    return out, lse, of_tiles[0] if of_tiles else None


def _attend(refs: Any, ring: LatentRing, sizes: LatentSizes, num_tokens: int, warpgroup: jax.Array) -> None:
    """One warpgroup's part of all pieces of this thread block."""
    block = lax.axis_index("block")
    first, end = refs.blocks[block, 0], refs.blocks[block, 1]

    def attend_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        keys = _keys(refs, piece)

        @pl.when(warpgroup == 0)
        def _() -> None:
            pl.when(piece > first)(lambda: plgpu.barrier_wait(refs.q_free))
            target = refs.q_tile.at[pl.ds(0, refs.q.shape[1])]
            plgpu.copy_gmem_to_smem(refs.q.at[refs.tiles[piece]], target, refs.q_full)
            for i in range(ring.config.stages - 1):
                fetch = functools.partial(_fetch, refs, ring, piece, step, jnp.int32(i))
                pl.when(i < keys.num_blocks)(fetch)

        plgpu.barrier_wait(refs.q_full)

        def whole(i: jax.Array, state: RowState) -> RowState:
            return _attend_block(refs, ring, piece, step, i, state, None)

        def cut(i: jax.Array, state: RowState) -> RowState:
            return _attend_block(refs, ring, piece, step, i, state, _bounds(refs, ring.config, piece, num_tokens))

        state = lax.fori_loop(0, keys.num_whole, whole, RowState.empty(ring.config.head_dim_v // WARPGROUPS))
        state = lax.fori_loop(keys.num_whole, keys.num_blocks, cut, state)
        plgpu.barrier_arrive(refs.q_free)
        _store(refs, piece, warpgroup, *state.finish(), num_split_blocks=sizes.num_blocks)
        return step + keys.num_blocks

    num_steps = lax.fori_loop(first, end, attend_piece, jnp.int32(0))

    @pl.when(warpgroup == 0)
    def _() -> None:
        pl.when(end > first)(lambda: plgpu.barrier_wait(refs.q_free))
        ring.drain(num_steps)
        plgpu.wait_smem_to_gmem(0)


def _keys(refs: Any, piece: jax.Array) -> Keys:
    return Keys(*(refs.pieces[piece, field] for field in Field if field >= Field.FIRST))


def _fetch(refs: Any, ring: LatentRing, piece: jax.Array, step: jax.Array, i: jax.Array) -> None:
    """Starts the copies of the `i`-th block of a piece whose first step is `step`."""
    keys = _keys(refs, piece)
    ring.fetch(step + i, refs.pieces[piece, Field.SEQ], keys, keys.block(i))


def _bounds(refs: Any, config: GpuConfig, piece: jax.Array, num_tokens: int) -> RowBounds:
    """What each row sees; rows beyond the tile's see what its last token does."""
    if num_tokens == 1:
        keys = _keys(refs, piece)
        return RowBounds(keys.lower, keys.upper)
    token = lax.div(mosaic_gpu.row_index(mosaic_gpu.ROWS), jnp.int32(config.group))
    pos = lax.min(token, jnp.int32(num_tokens - 1)) + refs.pieces[piece, POS]
    return RowBounds(config.mask.lower(pos), config.mask.upper(pos, refs.pieces[piece, SEQ_LEN]))


def _attend_block(
    refs: Any, ring: LatentRing, piece: jax.Array, step: jax.Array, i: jax.Array, state: RowState,
    bounds: RowBounds | None,
) -> RowState:  # fmt: skip
    """`state` after the `i`-th block of a piece whose first step is `step`; the first warpgroup fetches ahead."""
    config, keys = ring.config, _keys(refs, piece)
    ahead = i + (config.stages - 1)
    pl.when((ring.reader == 0) & (ahead < keys.num_blocks))(lambda: _fetch(refs, ring, piece, step, ahead))
    first_slot = keys.block(i) * config.block
    latents = ring.take(step + i, None if bounds is None else seen_by_any(config, keys, first_slot))
    scores = mosaic_gpu.dot_transposed(refs.q_tile, latents) * (refs.scale[0] * config.score_factor)
    state, p = weigh(state, scores, config, keys, bounds, first_slot)
    columns = config.head_dim_v // WARPGROUPS
    values = latents.at[:, pl.ds(pl.multiple_of(ring.reader * columns, columns), columns)]
    total = mosaic_gpu.dot_add(state.total, p, values)
    ring.release(step + i)
    return state._replace(total=total)


def _store(
    refs: Any, piece: jax.Array, warpgroup: jax.Array, out: jax.Array, lse: jax.Array, *, num_split_blocks: int
) -> None:
    """Stores a piece where those of its kind stand: the first thread blocks have those of split keys."""
    if not hasattr(refs, "tile_out"):
        store_piece(refs, piece, warpgroup, out, lse)
        return
    is_split = lax.axis_index("block") < num_split_blocks
    pl.when(~is_split)(lambda: _store_columns(refs.tile_out, piece - refs.out.shape[0], warpgroup, out))
    pl.when(is_split)(lambda: _store_columns(refs.out, piece, warpgroup, out))
    _store_lse(refs, piece, warpgroup, lse)


def store_piece(refs: Any, piece: jax.Array, warpgroup: jax.Array, out: jax.Array, lse: jax.Array) -> None:
    """Stores a warpgroup's columns straight from registers, and the first one the LSE."""
    _store_columns(refs.out, piece, warpgroup, out)
    _store_lse(refs, piece, warpgroup, lse)


def _store_columns(target: Any, piece: jax.Array, warpgroup: jax.Array, out: jax.Array) -> None:
    columns = out.shape[1]
    own = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns)
    mosaic_gpu.store_plain(target.at[piece, :, own], out.astype(target.dtype))


def _store_lse(refs: Any, piece: jax.Array, warpgroup: jax.Array, lse: jax.Array) -> None:
    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.lse_tile[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.lse_tile, refs.lse.at[piece])

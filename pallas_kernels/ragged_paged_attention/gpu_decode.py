"""Decoding on the GPU: one query token per sequence or a few, split KV over a work list.

Flow:    q, pages, tables + DecodePlan -> [decode_pieces] -> out, LSE per piece -> gpu.merge
Source:  split KV as Flash-Decoding and FlashMLA's scheduler (deepseek-ai/FlashMLA), by the project's own plan

Grid (C,): each thread block attends its pieces one after the other. A warpgroup fetches queries and KV blocks, the
other attends. The query heads of a KV head, of each token in turn, fill the rows of a tensor-core tile of 64; only rows
in use are stored. Per KV block of n slots it reads n * (D + Dv) elements and does 2 * 64 * n * (D + Dv) flops, of which
tokens * group / 64 count: bound by memory. Rows differ in what they see only in blocks that the mask cuts.
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
from pallas_kernels.gpu.kv import KVRing, RingMemory
from pallas_kernels.gpu.merge import padded_columns
from pallas_kernels.gpu.places import PageView
from pallas_kernels.gpu.plan import DecodePlan, Field, GpuConfig, Keys
from pallas_kernels.gpu.softmax import Reader, RowBounds, RowState, attend, of_head

_ATTENDING, _FETCHING = 0, 1  # warpgroups
_QUERY_STAGES = 2


def out_columns(head_dim_v: int) -> int:
    """Columns of the results in shared memory at a time: a part of Dv, small where KV blocks need the room."""
    most = 128 if head_dim_v <= 128 else 64
    return max(columns for columns in range(16, most + 1, 16) if head_dim_v % columns == 0)


def fixed_bytes(head_dim: int, head_dim_v: int) -> int:
    """Shared memory apart from KV blocks: queries and results; LSE, barriers and gaps before aligned arrays."""
    return mosaic.ROWS * (2 * _QUERY_STAGES * head_dim + 4 * out_columns(head_dim_v)) + 4096


def decode_pieces(
    q: jax.Array,  # [S * tokens, Hq, D] in the compute dtype, `config.queries` tokens of each sequence
    pages: tuple[PageView, PageView],  # of K and V, entries [Hkv, D] and [Hkv, Dv]
    block_tables: jax.Array,  # int32[S, P]
    plan: DecodePlan,
    scales: jax.Array,  # float32[1 or Hkv] of the keys
    config: GpuConfig,
) -> tuple[jax.Array, jax.Array]:
    """(out float32[pieces, rows, padded Dv], natural-log LSE float32[pieces, rows]) of each piece.

    Row `token * group + head`, and padding. Rows of tokens that a sequence does not have are undefined.
    """
    by_token = q.reshape(-1, config.queries, config.num_kv_heads, config.group, config.head_dim)
    rows = by_token.swapaxes(1, 2).reshape(-1, config.queries * config.group, config.head_dim)
    rows = jnp.pad(rows, [(0, 0), (0, config.padded_rows - rows.shape[1]), (0, 0)])
    num_pieces, columns = plan.pieces.shape[0], out_columns(config.head_dim_v)
    query_barrier = plgpu.Barrier(num_barriers=_QUERY_STAGES)
    places = (pages[0].places, pages[1].places)

    def body(refs: _Refs) -> None:
        ring = KVRing(config, refs.tables, refs.k_pages, refs.v_pages, places, refs.ring)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _ATTENDING)(lambda: _attend_pieces(refs, ring))
        pl.when(warpgroup == _FETCHING)(lambda: _fetch_pieces(refs, ring))

    out_shape = (num_pieces, config.padded_rows, padded_columns(config.head_dim_v))
    results = call(
        body,
        _Refs,
        name=f"rpa_decode_p{config.page_size}_b{config.block}",
        grid={"block": plan.blocks.shape[0]},
        inputs={
            "q": rows,
            "k_pages": pages[0].entries,
            "v_pages": pages[1].entries,
            "tables": block_tables,
            "pieces": plan.pieces,
            "blocks": plan.blocks,
            "scales": scales,
        },
        outputs={
            "out": jax.ShapeDtypeStruct(out_shape, jnp.float32),
            "lse": jax.ShapeDtypeStruct(out_shape[:2], jnp.float32),
        },
        scratch={
            "q_tile": mosaic.tiled((_QUERY_STAGES, mosaic.ROWS, config.head_dim), config.compute_dtype),
            "out_tile": mosaic.tiled((mosaic.ROWS, columns), jnp.float32),
            "lse_tile": plgpu.SMEM((mosaic.ROWS,), jnp.float32),
            "q_full": query_barrier,
            "q_free": query_barrier,
            "ring": RingMemory.of(config, num_readers=1),
        },
        num_warpgroups=2,
    )
    return results["out"], results["lse"]


class _Refs(NamedTuple):
    """References of a thread block."""

    q: Any  # [S * Hkv, rows, D]
    k_pages: Any  # [tokens, Hkv, D]
    v_pages: Any  # [tokens, Hkv, Dv]
    tables: Any  # int32[S, P]
    pieces: Any  # int32[pieces, fields] of `DecodePlan`
    blocks: Any  # int32[C, 2] of `DecodePlan`
    scales: Any  # float32[1 or Hkv]
    out: Any  # float32[pieces, rows, padded Dv]
    lse: Any  # float32[pieces, rows]
    q_tile: Any  # [stages, 64, D]
    out_tile: Any  # float32[64, columns]
    lse_tile: Any  # float32[64]
    q_full: Any  # barriers: the queries of a stage have arrived
    q_free: Any  # barriers: they have been read
    ring: RingMemory


def _piece_range(refs: _Refs) -> tuple[jax.Array, jax.Array]:
    """This thread block's pieces: first, and one after the last."""
    block = lax.axis_index("block")
    return refs.blocks[block, 0], refs.blocks[block, 1]


def _bounds(refs: _Refs, config: GpuConfig, piece: jax.Array, keys: Keys) -> RowBounds:
    """What each row's token sees: tokens before position 0 see nothing."""
    if config.queries == 1:
        return RowBounds(keys.lower, keys.upper)
    token = lax.div(mosaic.row_index(mosaic.ROWS), jnp.int32(config.group))
    pos = token + refs.pieces[piece, Field.POS]
    upper = config.mask.upper(pos, refs.pieces[piece, Field.SEQ_LEN])
    return RowBounds(config.mask.lower(pos), upper if config.mask.causal else jnp.where(pos < 0, -1, upper))


def _fetch_pieces(refs: _Refs, ring: KVRing) -> None:
    """The fetching warpgroup: queries and KV blocks of all pieces."""
    first, end = _piece_range(refs)
    heads, rows = ring.config.num_kv_heads, ring.config.padded_rows

    def fetch_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        seq, head = refs.pieces[piece, Field.SEQ], refs.pieces[piece, Field.HEAD]
        keys = Keys.of_piece(refs.pieces, piece)
        i = piece - first
        slot = lax.rem(i, jnp.int32(_QUERY_STAGES))
        pl.when(i >= _QUERY_STAGES)(lambda: plgpu.barrier_wait(refs.q_free.at[slot]))
        queries = refs.q_tile.at[slot, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(refs.q.at[seq * heads + head], queries, refs.q_full.at[slot])

        @pl.loop(jnp.int32(0), keys.num_blocks)
        def _(j: jax.Array) -> None:
            ring.fetch(step + j, seq, head, keys, keys.block(j))

        return step + keys.num_blocks

    num_steps = lax.fori_loop(first, end, fetch_piece, jnp.int32(0))
    ring.drain(num_steps)

    @pl.loop(lax.max(end - first - _QUERY_STAGES, jnp.int32(0)), end - first)
    def _(i: jax.Array) -> None:
        plgpu.barrier_wait(refs.q_free.at[lax.rem(i, jnp.int32(_QUERY_STAGES))])


def _attend_pieces(refs: _Refs, ring: KVRing) -> None:
    """The attending warpgroup: softmax over the blocks of each piece, results to global memory."""
    first, end = _piece_range(refs)

    def attend_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        keys = Keys.of_piece(refs.pieces, piece)
        scale = of_head(refs.scales, refs.pieces[piece, Field.HEAD]) * ring.config.score_factor
        slot = lax.rem(piece - first, jnp.int32(_QUERY_STAGES))
        plgpu.barrier_wait(refs.q_full.at[slot])
        reader = Reader(ring, refs.q_tile.at[slot], scale)

        def whole(i: jax.Array, state: RowState) -> RowState:
            return attend(state, reader, keys, None, i, step + i)

        def cut(i: jax.Array, state: RowState) -> RowState:
            return attend(state, reader, keys, _bounds(refs, ring.config, piece, keys), i, step + i)

        state = lax.fori_loop(0, keys.num_whole, whole, RowState.empty(ring.config.head_dim_v))
        state = lax.fori_loop(keys.num_whole, keys.num_blocks, cut, state)
        plgpu.barrier_arrive(refs.q_free.at[slot])
        _store(refs, ring.config, piece, state)
        return step + keys.num_blocks

    lax.fori_loop(first, end, attend_piece, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _store(refs: _Refs, config: GpuConfig, piece: jax.Array, state: RowState) -> None:
    """Stores the rows in use of a piece, a part of the columns at a time."""
    out, lse = state.finish()
    columns, rows = out_columns(config.head_dim_v), pl.ds(0, config.padded_rows)
    for start in range(0, config.head_dim_v, columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.out_tile[...] = out[:, start : start + columns]
        if start == 0:
            refs.lse_tile[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.out_tile.at[rows], refs.out.at[piece, :, pl.ds(start, columns)])
        if start == 0:
            plgpu.copy_smem_to_gmem(refs.lse_tile.at[rows], refs.lse.at[piece])

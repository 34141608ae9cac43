"""Decoding on the GPU: one query token per sequence, split KV over a work list, then a merge of the pieces.

Flow:    q, pages, tables + DecodePlan -> [decode_pieces] -> out, LSE per piece -> [merge_pieces] -> out, LSE per row
Source:  split KV as Flash-Decoding and FlashMLA's scheduler (deepseek-ai/FlashMLA), by the project's own plan

`decode_pieces`, grid (C,): each thread block attends its pieces one after the other. A warpgroup fetches queries and
KV blocks, the other attends. The query heads of a KV head fill the rows of a tensor-core tile of 64; only rows in use
are stored. Per KV block of n slots it reads n * (D + Dv) elements and does 2 * 64 * n * (D + Dv) flops, of which
group / 64 count: bound by memory.

`merge_pieces`, grid (units, query heads of each): adds up the pieces of a unit, with its sink.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.layouts import cdiv
from pallas_kernels.ragged_paged_attention.gpu_kv import KVRing
from pallas_kernels.ragged_paged_attention.gpu_plan import DecodePlan, Field, GpuConfig, Keys
from pallas_kernels.ragged_paged_attention.gpu_softmax import LOG2_E, RowBounds, RowState, attend

_ATTENDING, _FETCHING = 0, 1  # warpgroups
_QUERY_STAGES = 2
_PIECES_AT_ONCE = 4  # that the merge loads before it adds them up
_VECTOR = 128  # elements that a warpgroup loads at once


def out_columns(head_dim_v: int) -> int:
    """Columns of the results in shared memory at a time: a part of Dv, small where KV blocks need the room."""
    most = 128 if head_dim_v <= 128 else 64
    return max(columns for columns in range(16, most + 1, 16) if head_dim_v % columns == 0)


def fixed_bytes(head_dim: int, head_dim_v: int) -> int:
    """Shared memory apart from KV blocks: queries and results; LSE, barriers and gaps before aligned arrays."""
    return mosaic_gpu.ROWS * (2 * _QUERY_STAGES * head_dim + 4 * out_columns(head_dim_v)) + 4096


def decode_pieces(
    q: jax.Array,  # [S, Hq, D] in the compute dtype
    pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,  # int32[S, P]
    plan: DecodePlan,
    scales: jax.Array,  # float32[Hkv] of `logit_scales`
    config: GpuConfig,
) -> tuple[jax.Array, jax.Array]:
    """(out float32[pieces, padded group, padded Dv], natural-log LSE float32[pieces, padded group]) of each piece."""
    num_seqs = q.shape[0]
    rows = q.reshape(num_seqs * config.num_kv_heads, config.group, config.head_dim)
    rows = jnp.pad(rows, [(0, 0), (0, config.padded_group - config.group), (0, 0)])
    num_pieces, columns = plan.pieces.shape[0], out_columns(config.head_dim_v)
    outputs = [
        jax.ShapeDtypeStruct((num_pieces, config.padded_group, _padded(config.head_dim_v)), jnp.float32),
        jax.ShapeDtypeStruct((num_pieces, config.padded_group), jnp.float32),
    ]
    query_barrier = plgpu.Barrier(num_barriers=_QUERY_STAGES)
    scratch = {
        "q_tile": mosaic_gpu.tiled((_QUERY_STAGES, mosaic_gpu.ROWS, config.head_dim), config.compute_dtype),
        "out_tile": mosaic_gpu.tiled((mosaic_gpu.ROWS, columns), jnp.float32),
        "lse_tile": plgpu.SMEM((mosaic_gpu.ROWS,), jnp.float32),
        "q_full": query_barrier,
        "q_free": query_barrier,
        **KVRing.scratch(config, num_readers=1),
    }
    names = ("q", "k_pages", "v_pages", "tables", "pieces", "blocks", "scales", "out", "lse", *scratch)

    def body(*args: Any) -> None:
        refs = SimpleNamespace(**dict(zip(names, args, strict=True)))
        ring = KVRing.of(config, vars(refs))
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _ATTENDING)(lambda: _attend_pieces(refs, ring))
        pl.when(warpgroup == _FETCHING)(lambda: _fetch_pieces(refs, ring))

    run = mosaic_gpu.kernel(
        body,
        name=f"rpa_decode_p{config.page_size}_b{config.block}",
        outputs=outputs,
        scratch=list(scratch.values()),
        grid={"block": plan.blocks.shape[0]},
        num_warpgroups=2,
    )
    out, lse = run(rows, *pages, block_tables, plan.pieces, plan.blocks, scales)
    return out, lse


def _padded(head_dim_v: int) -> int:
    return cdiv(head_dim_v, _VECTOR) * _VECTOR


def _piece_range(refs: Any) -> tuple[jax.Array, jax.Array]:
    """This thread block's pieces: first, and one after the last."""
    block = lax.axis_index("block")
    return refs.blocks[block, 0], refs.blocks[block, 1]


def _keys(refs: Any, piece: jax.Array) -> Keys:
    return Keys(*(refs.pieces[piece, field] for field in Field if field >= Field.FIRST))


def _fetch_pieces(refs: Any, ring: KVRing) -> None:
    """The fetching warpgroup: queries and KV blocks of all pieces."""
    first, end = _piece_range(refs)
    heads, group = ring.config.num_kv_heads, ring.config.padded_group

    def fetch_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        seq, head, keys = refs.pieces[piece, Field.SEQ], refs.pieces[piece, Field.HEAD], _keys(refs, piece)
        i = piece - first
        slot = lax.rem(i, jnp.int32(_QUERY_STAGES))
        pl.when(i >= _QUERY_STAGES)(lambda: plgpu.barrier_wait(refs.q_free.at[slot]))
        queries = refs.q_tile.at[slot, pl.ds(0, group)]
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


def _attend_pieces(refs: Any, ring: KVRing) -> None:
    """The attending warpgroup: softmax over the blocks of each piece, results to global memory."""
    first, end = _piece_range(refs)

    def attend_piece(piece: jax.Array, step: jax.Array) -> jax.Array:
        keys = _keys(refs, piece)
        scale = refs.scales[refs.pieces[piece, Field.HEAD]]
        slot = lax.rem(piece - first, jnp.int32(_QUERY_STAGES))
        plgpu.barrier_wait(refs.q_full.at[slot])
        q = refs.q_tile.at[slot]

        def whole(i: jax.Array, state: RowState) -> RowState:
            return attend(state, ring, q, scale, keys, None, i, step + i)

        def cut(i: jax.Array, state: RowState) -> RowState:
            return attend(state, ring, q, scale, keys, RowBounds(keys.lower, keys.upper), i, step + i)

        state = lax.fori_loop(0, keys.num_whole, whole, RowState.empty(ring.config.head_dim_v))
        state = lax.fori_loop(keys.num_whole, keys.num_blocks, cut, state)
        plgpu.barrier_arrive(refs.q_free.at[slot])
        _store(refs, ring.config, piece, state)
        return step + keys.num_blocks

    lax.fori_loop(first, end, attend_piece, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _store(refs: Any, config: GpuConfig, piece: jax.Array, state: RowState) -> None:
    """Stores the rows in use of a piece, a part of the columns at a time."""
    out, lse = state.finish()
    columns, rows = out_columns(config.head_dim_v), pl.ds(0, config.padded_group)
    for start in range(0, config.head_dim_v, columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.out_tile[...] = out[:, start : start + columns]
        if start == 0:
            refs.lse_tile[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.out_tile.at[rows], refs.out.at[piece, :, pl.ds(start, columns)])
        if start == 0:
            plgpu.copy_smem_to_gmem(refs.lse_tile.at[rows], refs.lse.at[piece])


def merge_pieces(
    pieces: tuple[jax.Array, jax.Array],  # of `decode_pieces`
    units: jax.Array,  # int32[U, 2] of the plan
    sinks: jax.Array,  # float32[Hq]
    v_scale: jax.Array,  # float32[Hkv]
    config: GpuConfig,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out [S, Hq, Dv], natural-log LSE float32[S, Hq]): 0 and -inf for sequences without keys."""
    num_units, columns = units.shape[0], _padded(config.head_dim_v)
    outputs = [
        jax.ShapeDtypeStruct((num_units, config.group, columns), out_dtype),
        jax.ShapeDtypeStruct((num_units, config.group), jnp.float32),
    ]

    def body(*args: Any) -> None:
        names = ("units", "piece_out", "piece_lse", "sinks", "v_scale", "out", "lse")
        _merge(SimpleNamespace(**dict(zip(names, args, strict=True))), config, columns)

    grid = {"unit": num_units, "head": config.group}
    run = mosaic_gpu.kernel(body, name="rpa_merge_pieces", outputs=outputs, grid=grid)
    out, lse = run(units, *pieces, sinks, v_scale)
    num_seqs, num_q_heads = num_units // config.num_kv_heads, config.num_kv_heads * config.group
    return out[..., : config.head_dim_v].reshape(num_seqs, num_q_heads, -1), lse.reshape(num_seqs, num_q_heads)


def _merge(refs: Any, config: GpuConfig, columns: int) -> None:
    """One query head of one unit; natural-log units throughout, so that no finite sink overflows."""
    unit, row = lax.axis_index("unit"), lax.axis_index("head")
    head = lax.rem(unit, jnp.int32(config.num_kv_heads))
    first, end = refs.units[unit, 0], refs.units[unit, 1]
    sink = refs.sinks[head * config.group + row]

    def add(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, top, weight, total = carry
        numbers = [first + i * _PIECES_AT_ONCE + j for j in range(_PIECES_AT_ONCE)]
        places = [lax.min(number, end - 1) for number in numbers]
        logs = [
            jnp.where(number < end, refs.piece_lse[place, row], -jnp.inf)
            for number, place in zip(numbers, places, strict=True)
        ]
        parts = [refs.piece_out[place, row] for place in places]
        for log, part in zip(logs, parts, strict=True):
            top = jnp.maximum(top, log)
            new_m = jnp.maximum(m, log)
            shrink, share = _exp(m - _finite(new_m)), _exp(log - _finite(new_m))
            weight, total, m = weight * shrink + share, total * shrink + part * share, new_m
        return m, top, weight, total

    num_loads = lax.div(end - first + (_PIECES_AT_ONCE - 1), jnp.int32(_PIECES_AT_ONCE))
    start = (sink, jnp.float32(-math.inf), _exp(sink - _finite(sink)), jnp.zeros((columns,), jnp.float32))
    m, top, weight, total = lax.fori_loop(0, num_loads, add, start)
    nothing = top == -jnp.inf
    out = total * jnp.where(nothing, 0.0, refs.v_scale[head] / weight)
    refs.out[unit, row] = out.astype(refs.out.dtype)
    refs.lse[unit, row] = jnp.where(nothing, -jnp.inf, m + jnp.log(weight))


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp2(x * LOG2_E)


def _finite(m: jax.Array) -> jax.Array:
    return jnp.where(m == -jnp.inf, 0.0, m)

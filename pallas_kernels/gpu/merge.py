"""Merge on the GPU of the pieces in which thread blocks have attended what decodes.

Flow:    out, LSE per piece + Shares.units -> [merge_pieces] -> out, LSE per row

Grid (query heads of a unit, units): adds up the pieces of a unit, with its sink. It can put them straight where the
results of a step's other tokens stand, so that no launch sorts the two by token.
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

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.softmax import LOG2_E, capped_sink, of_head
from pallas_kernels.layouts import cdiv

_PIECES_AT_ONCE = 4  # loaded before they are added up
_VECTOR = 128  # elements that a warpgroup loads at once


def padded_columns(head_dim_v: int) -> int:
    """Columns of a piece's values."""
    return cdiv(head_dim_v, _VECTOR) * _VECTOR


def merge_pieces(
    pieces: tuple[jax.Array, jax.Array],  # out float32[pieces, rows, padded Dv], natural-log LSE float32[pieces, rows]
    units: jax.Array,  # int32[S * Hkv, 2] of `Shares`
    sinks: jax.Array,  # float32[Hq], or float32[1] with `heads`
    v_scale: jax.Array,  # float32[Hkv], or float32[1] with `heads`
    head_dim_v: int,
    out_dtype: Any,
    *,
    heads: tuple[int, int] | None = None,  # KV and query heads
    into: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [S, Hq, Dv], natural-log LSE float32[S, Hq]): 0 and -inf for sequences without keys.

    With `into`, int32[S] tokens and [T, Hq, Dv], each sequence's results replace those of its token in the array, which
    comes back in place of `out`; of a token -1 they are left out.
    """
    num_kv_heads, num_q_heads = heads or (v_scale.shape[0], sinks.shape[0])
    num_seqs, group = units.shape[0] // num_kv_heads, num_q_heads // num_kv_heads
    row_shape, lse_shape = (num_q_heads, head_dim_v), jax.ShapeDtypeStruct((num_seqs, num_q_heads), jnp.float32)
    grid = {"head": group, "unit": units.shape[0]}
    inputs = (units, *pieces, sinks, v_scale)
    names = ("units", "piece_out", "piece_lse", "sinks", "v_scale")

    def run_with(*names: str) -> Any:
        return lambda *args: _merge(SimpleNamespace(**dict(zip(names, args, strict=True))), num_kv_heads, group)

    if into is None:
        outputs = [jax.ShapeDtypeStruct((num_seqs, *row_shape), out_dtype), lse_shape]
        body = run_with(*names, "out", "lse")
        out, lse = mosaic.kernel(body, name="rpa_merge_pieces", outputs=outputs, grid=grid)(*inputs)
        return out, lse
    body = run_with(*names, "tokens", "out", "lse")
    merge = mosaic.kernel_in_place(body, name="rpa_merge_into", outputs=[lse_shape], grid=grid)
    (lse,), out = merge(*inputs, *into)
    return out, lse


def _merge(refs: Any, num_kv_heads: int, group: int) -> None:
    """One query head of one unit."""
    unit, row = lax.axis_index("unit"), lax.axis_index("head")
    head, seq = lax.rem(unit, jnp.int32(num_kv_heads)), lax.div(unit, jnp.int32(num_kv_heads))
    q_head = head * group + row
    if not hasattr(refs, "tokens"):
        _merge_row(refs, unit, head, q_head, row, seq, seq)
        return
    token = refs.tokens[seq]
    pl.when(token >= 0)(lambda: _merge_row(refs, unit, head, q_head, row, seq, token))


def _merge_row(
    refs: Any, unit: jax.Array, head: jax.Array, q_head: jax.Array, row: jax.Array, seq: jax.Array, token: jax.Array
) -> None:
    """Natural-log units throughout, so that no finite sink overflows."""
    columns = refs.piece_out.shape[-1]
    first, end = refs.units[unit, 0], refs.units[unit, 1]
    sink = capped_sink(of_head(refs.sinks, q_head))

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
    out = (total * jnp.where(nothing, 0.0, of_head(refs.v_scale, head) / weight)).astype(refs.out.dtype)
    refs.lse[seq, q_head] = jnp.where(nothing, -jnp.inf, m + jnp.log(weight))
    if columns == refs.out.shape[-1]:
        refs.out[token, q_head] = out
        return

    def store_part(own: Any) -> None:
        own[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own.at[pl.ds(0, refs.out.shape[-1])], refs.out.at[token, q_head])
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(store_part, plgpu.SMEM((columns,), refs.out.dtype))


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp2(x * LOG2_E)


def _finite(m: jax.Array) -> jax.Array:
    return jnp.where(m == -jnp.inf, 0.0, m)

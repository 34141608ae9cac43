"""Merge on the GPU of the pieces in which thread blocks have attended what decodes.

Flow:    out, LSE per piece + Shares.units -> [merge_pieces] -> out, LSE per row

Grid (query heads of a unit, units): adds up the pieces of a unit, with its sink.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu
from pallas_kernels.layouts import cdiv
from pallas_kernels.ragged_paged_attention.gpu_softmax import LOG2_E

_PIECES_AT_ONCE = 4  # loaded before they are added up
_VECTOR = 128  # elements that a warpgroup loads at once


def padded_columns(head_dim_v: int) -> int:
    """Columns of a piece's values."""
    return cdiv(head_dim_v, _VECTOR) * _VECTOR


def merge_pieces(
    pieces: tuple[jax.Array, jax.Array],  # out float32[pieces, rows, padded Dv], natural-log LSE float32[pieces, rows]
    units: jax.Array,  # int32[S * Hkv, 2] of `Shares`
    sinks: jax.Array,  # float32[Hq]
    v_scale: jax.Array,  # float32[Hkv]
    head_dim_v: int,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out [S, Hq, Dv], natural-log LSE float32[S, Hq]): 0 and -inf for sequences without keys."""
    num_units, num_kv_heads, num_q_heads = units.shape[0], v_scale.shape[0], sinks.shape[0]
    group, columns = num_q_heads // num_kv_heads, padded_columns(head_dim_v)
    outputs = [
        jax.ShapeDtypeStruct((num_units, group, columns), out_dtype),
        jax.ShapeDtypeStruct((num_units, group), jnp.float32),
    ]

    def body(*args: Any) -> None:
        names = ("units", "piece_out", "piece_lse", "sinks", "v_scale", "out", "lse")
        _merge(SimpleNamespace(**dict(zip(names, args, strict=True))))

    grid = {"head": group, "unit": num_units}
    run = mosaic_gpu.kernel(body, name="rpa_merge_pieces", outputs=outputs, grid=grid)
    out, lse = run(units, *pieces, sinks, v_scale)
    num_seqs = num_units // num_kv_heads
    return out[..., :head_dim_v].reshape(num_seqs, num_q_heads, -1), lse.reshape(num_seqs, num_q_heads)


def _merge(refs: Any) -> None:
    """One query head of one unit; natural-log units throughout, so that no finite sink overflows."""
    unit, row = lax.axis_index("unit"), lax.axis_index("head")
    num_kv_heads, columns = refs.v_scale.shape[0], refs.out.shape[-1]
    head = lax.rem(unit, jnp.int32(num_kv_heads))
    first, end = refs.units[unit, 0], refs.units[unit, 1]
    sink = refs.sinks[head * (refs.sinks.shape[0] // num_kv_heads) + row]

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

"""Merge on the GPU of the pieces in which thread blocks have attended what decodes.

Flow:    out, LSE per piece + Shares.units -> [merge_pieces] -> out, LSE per row

Grid (query heads of a unit, results * KV heads): adds up the pieces of one row, with its sink. A unit has a row for
each query head of a KV head, of each of its sequence's few tokens in turn; a *slot* is a token of those, `queries` of
each sequence. Results can go straight where those of a step's other tokens stand, so that no launch sorts the two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.call import call
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
    queries: int = 1,
    slots: jax.Array | None = None,  # int32[n] slot of each result, -1: it is of no token; None: of all slots in order
    into: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [n, Hq, Dv], natural-log LSE float32[n, Hq]): 0 and -inf for sequences without keys, and of no token.

    With `into`, int32[n] tokens and [T, Hq, Dv], results replace those of their tokens in the array, which comes back
    in place of `out`; of a token -1 they are left out.
    """
    num_kv_heads, num_q_heads = heads or (v_scale.shape[0], sinks.shape[0])
    num_units, group = units.shape[0], num_q_heads // num_kv_heads
    num_results = num_units // num_kv_heads * queries if slots is None else slots.shape[0]
    row_shape, lse_shape = (num_q_heads, head_dim_v), jax.ShapeDtypeStruct((num_results, num_q_heads), jnp.float32)
    tokens, in_place = (None, {}) if into is None else (into[0], {"out": into[1]})
    outputs = {"lse": lse_shape}
    if into is None:
        outputs = {"out": jax.ShapeDtypeStruct((num_results, *row_shape), out_dtype), **outputs}
    results = call(
        lambda refs: _merge(refs, num_kv_heads, group, queries),
        _Refs,
        name="rpa_merge_pieces" if into is None else "rpa_merge_into",
        grid={"head": group, "unit": num_results * num_kv_heads},
        inputs={
            "units": units,
            "piece_out": pieces[0],
            "piece_lse": pieces[1],
            "sinks": sinks,
            "v_scale": v_scale,
            "slots": slots,
            "tokens": tokens,
        },
        outputs=outputs,
        in_place=in_place,
    )
    return results["out"], results["lse"]


class _Refs(NamedTuple):
    """References of a thread block."""

    units: Any  # int32[S * Hkv, 2]
    piece_out: Any  # float32[pieces, rows, padded Dv]
    piece_lse: Any  # float32[pieces, rows]
    sinks: Any  # float32[Hq or 1]
    v_scale: Any  # float32[Hkv or 1]
    slots: Any | None  # int32[n]
    tokens: Any | None  # int32[n]
    out: Any  # [n or T, Hq, Dv]
    lse: Any  # float32[n, Hq]


class _Row(NamedTuple):
    """What one thread block adds up, and where it belongs; int32[] each."""

    head: jax.Array  # KV head
    q_head: jax.Array
    first: jax.Array  # piece of the unit
    end: jax.Array  # one after its last piece
    row: jax.Array  # of a piece
    result: jax.Array


def _merge(refs: _Refs, num_kv_heads: int, group: int, queries: int) -> None:
    """One query head of one result."""
    place, own = lax.axis_index("unit"), lax.axis_index("head")
    head, result = lax.rem(place, jnp.int32(num_kv_heads)), lax.div(place, jnp.int32(num_kv_heads))
    found = result if refs.slots is None else refs.slots[result]
    slot = found if refs.slots is None else lax.max(found, jnp.int32(0))
    seq, token_of_seq = lax.div(slot, jnp.int32(queries)), lax.rem(slot, jnp.int32(queries))
    unit = seq * num_kv_heads + head
    first, end = refs.units[unit, 0], refs.units[unit, 1]
    end = end if refs.slots is None else jnp.where(found < 0, first, end)
    row = _Row(head, head * group + own, first, end, token_of_seq * group + own, result)
    if refs.tokens is None:
        _merge_row(refs, row, result)
        return
    token = refs.tokens[result]
    pl.when(token >= 0)(lambda: _merge_row(refs, row, token))


def _merge_row(refs: _Refs, own: _Row, token: jax.Array) -> None:
    """Natural-log units throughout, so that no finite sink overflows."""
    head, q_head, first, end, row, result = own
    columns = refs.piece_out.shape[-1]
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
    refs.lse[result, q_head] = jnp.where(nothing, -jnp.inf, m + jnp.log(weight))
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

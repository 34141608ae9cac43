"""selective_scan for TPU, decode tokens: eight sequences a step, one token each, a tile of their heads or channels.

Flow:    tokens of the step's decode sequences, pages of their states -> [decode] -> (outputs, states in place)

States move as in `tpu.decode_states`, a DMA per sequence and tile. Bytes: each state read and written, beside which the
tokens are little; HBM binds.

Mamba 2 keeps a head as [P, N]. What a token adds, x[p] * b[n], is a matrix product of 16 rows, x in parts that make it
exact; outputs are one of c and the new states. Mamba 1 keeps channels in lanes, [N, H], in slabs [H / 128, N, 128],
and sums over sublanes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.slab_pages import is_in_slabs
from pallas_kernels.tpu.call import Operand
from pallas_kernels.tpu.decode_states import TOKENS, Pages, largest_divisor, launch
from pallas_kernels.tpu.mosaic import LANES, Ref

_BUFFER_BYTES = 5 << 18  # of one buffer, of four
_MOST_HEADS = 5  # of a tile: three parts of each fit the rows of one matrix product
_ROWS = 16


@jax.jit
def mamba2(
    states: jax.Array,  # [pages, H, P, N]
    x: jax.Array,  # float32[n, H, P] inputs times their time steps, n a multiple of 8
    decay: jax.Array,  # float32[n, H]
    b: jax.Array,  # [n, G, N]
    c: jax.Array,
    read: jax.Array,  # int32[n] pages, 0: from zero
    write: jax.Array,  # int32[n] pages, 0: nowhere
    num_decode: jax.Array,  # int32[]
) -> tuple[jax.Array, jax.Array]:
    """(c . state float32[n, H, P], right for the first `num_decode` tokens, states)."""
    _, num_heads, head_dim, state_dim = states.shape
    num_tokens, num_groups = b.shape[:2]
    most = min(_MOST_HEADS, _BUFFER_BYTES // (TOKENS * 4 * head_dim * state_dim))
    heads = largest_divisor(num_heads // num_groups, most)
    tiles = x.reshape(num_tokens, num_heads // heads, heads, head_dim)
    parts = split(tiles) if b.dtype == jnp.bfloat16 else (tiles,)
    rows = jnp.concatenate(parts, axis=2)
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[2] % _ROWS), (0, 0)])
    all_groups = pl.BlockSpec((TOKENS, num_groups, state_dim), lambda i, j, *_: (i, 0, 0))
    out, states = launch(
        functools.partial(_mamba2, heads_per_group=num_heads // num_groups, num_parts=len(parts), dtype=b.dtype),
        _Heads(
            x=Operand(rows, pl.BlockSpec((TOKENS, 1, *rows.shape[2:]), lambda i, j, *_: (i, j, 0, 0))),
            decay=Operand(decay, pl.BlockSpec((TOKENS, num_heads), lambda i, j, *_: (i, 0), memory_space=pltpu.SMEM)),
            b=Operand(b.astype(jnp.float32), all_groups),
            c=Operand(c.astype(jnp.float32), all_groups),
        ),
        Operand(
            jax.ShapeDtypeStruct((num_heads // heads, num_tokens, heads * head_dim), jnp.float32),
            pl.BlockSpec((1, TOKENS, heads * head_dim), lambda i, j, *_: (j, i, 0)),
        ),
        states,
        (heads, head_dim, state_dim),
        0,
        Pages(read, write, num_decode),
        name=f"ssd_decode_h{heads}",
    )
    return out.swapaxes(0, 1).reshape(num_tokens, num_heads, head_dim), states


def split(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """bfloat16 arrays whose sum is float32 `x`: products with bfloat16 add up to those of `x`."""

    def leading(x: jax.Array) -> jax.Array:  # by bits, as compilers may leave out a conversion there and back
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)

    high = leading(x)
    middle = leading(x - high)
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), (x - high - middle).astype(jnp.bfloat16)


class _Heads(NamedTuple):
    """What a tile of heads of eight tokens reads."""

    x: Ref  # [8, 1, rows, P] parts of the inputs, heads inner
    decay: Ref  # float32[8, H] in SMEM
    b: Ref  # float32[8, G, N]
    c: Ref  # float32[8, G, N]


def _mamba2(
    inputs: _Heads,
    out: Ref,  # float32[1, 8, heads * P]
    before: Ref,  # [8, heads, P, N]
    after: Ref,
    *,
    heads_per_group: int,
    num_parts: int,
    dtype: jnp.dtype,
) -> None:
    """One tile of heads of eight tokens; `dtype`: of the matrix products' operands."""
    x, decay, b, c = inputs
    num_heads, state_dim = before.shape[1], before.shape[3]
    first = pl.program_id(1) * num_heads
    group = pl.ds(lax.div(first, heads_per_group), 1)
    row = lax.broadcasted_iota(jnp.int32, (x.shape[2], state_dim), 0)
    token = lax.broadcasted_iota(jnp.int32, out.shape[1:], 0)
    seen = jnp.zeros(out.shape[1:], jnp.float32)
    factors = jnp.concatenate([c[t, group, :] for t in range(TOKENS)]).astype(dtype)
    for t in range(TOKENS):
        rows, shares, states = x[t, 0], b[t, group, :], []
        for k in range(num_heads):
            own = (row == k) | ((row >= num_heads) & (row < num_parts * num_heads) & (row % num_heads == k))
            inflow = _product(rows, jnp.where(own, shares, 0.0).astype(dtype), 0)
            state = before[t, k].astype(jnp.float32) * decay[t, first + k] + inflow
            after[t, k] = state.astype(after.dtype)
            states.append(state.astype(dtype))
        seen = jnp.where(token == t, _product(factors, jnp.concatenate(states), 1), seen)
    out[0] = seen


@jax.jit
def mamba1(
    states: jax.Array,  # [pages, N, H]; in slabs, a page as `PlaceInSlab.stored_shape` says
    x: jax.Array,  # float32[n, H] inputs times their time steps, n a multiple of 8
    dt: jax.Array,  # float32[n, H]
    a: jax.Array,  # float32[N, H]
    b: jax.Array,  # [n, N]
    c: jax.Array,
    read: jax.Array,  # int32[n] pages, 0: from zero
    write: jax.Array,  # int32[n] pages, 0: nowhere
    num_decode: jax.Array,  # int32[]
) -> tuple[jax.Array, jax.Array]:
    """(c . state float32[n, H], right for the first `num_decode` tokens, states)."""
    state_dim, num_channels = a.shape
    tiles = largest_divisor(num_channels // LANES, _BUFFER_BYTES // (TOKENS * 4 * state_dim * LANES))
    width = tiles * LANES
    of_channels = pl.BlockSpec((TOKENS, width), lambda i, j, *_: (i, j))
    of_states = pl.BlockSpec((TOKENS, state_dim), lambda i, j, *_: (i, 0))
    return launch(
        _mamba1,
        _Channels(
            x=Operand(x, of_channels),
            dt=Operand(dt, of_channels),
            a=Operand(a, pl.BlockSpec((state_dim, width), lambda i, j, *_: (0, j))),
            b=Operand(b.astype(jnp.float32), of_states),
            c=Operand(c.astype(jnp.float32), of_states),
        ),
        Operand(jax.ShapeDtypeStruct(x.shape, jnp.float32), of_channels),
        states,
        (tiles, state_dim, LANES) if is_in_slabs(states) else (state_dim, width),
        0 if is_in_slabs(states) else 1,
        Pages(read, write, num_decode),
        name=f"scan_decode_c{width}",
    )


class _Channels(NamedTuple):
    """What a tile of channels of eight tokens reads."""

    x: Ref  # float32[8, width]
    dt: Ref  # float32[8, width]
    a: Ref  # float32[N, width]
    b: Ref  # float32[8, N]
    c: Ref  # float32[8, N]


def _mamba1(
    inputs: _Channels,
    out: Ref,  # float32[8, width]
    before: Ref,  # [8, N, width]; in slabs [8, width / 128, N, 128]
    after: Ref,
) -> None:
    """One tile of channels of eight tokens."""
    x, dt, a, b, c = inputs
    state_dim, width = a.shape
    square = (state_dim, state_dim)
    diagonal = lax.broadcasted_iota(jnp.int32, square, 0) == lax.broadcasted_iota(jnp.int32, square, 1)

    def column(row: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)

    for t in range(TOKENS):
        own = slice(t, t + 1)
        inflow, seen = column(b[own]), column(c[own])
        for first in range(0, width, LANES):
            lanes = slice(first, first + LANES)
            decay = jnp.exp(dt[own, lanes] * a[:, lanes])
            place = (t, slice(None), lanes) if len(before.shape) == 3 else (t, first // LANES)
            state = before[place].astype(jnp.float32) * decay + x[own, lanes] * inflow
            after[place] = state.astype(after.dtype)
            out[own, lanes] = jnp.sum(state * seen, axis=0, keepdims=True)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Matrix product in float32 that sums over this axis of both."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((axis,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)

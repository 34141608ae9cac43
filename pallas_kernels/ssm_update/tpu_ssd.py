"""selective_scan of Mamba 2 for TPU, sequences of several tokens: the dual form, matrix products over chunks of 128.

Flow:    x, time steps, b, c of the step, segments -> [ssd] -> (outputs, states in place)
Source:  Mamba-2 (arXiv 2405.21060, section 6): within a chunk a masked attention, between chunks the state

Grid: one step per segment (`tpu_plan`). With `cum[t]` the sum of `dt * a` of its tokens up to t, in base 2, a segment
does for each head

    out[t]  = sum_s exp2(cum[t] - cum[s]) * dt[s] * (c[t] . b[s]) * x[s]  +  exp2(cum[t]) * c[t] . state
    state   = exp2(cum[last]) * state  +  sum_s exp2(cum[last] - cum[s]) * dt[s] * x[s] * b[s]

Heads narrower than 128 lanes go side by side, as many as fill them. The products `c . b` are made once a group. Tokens
of other sequences in the chunk get time step 0 and inputs 0. With bfloat16 inputs the products that make outputs take
bfloat16; what makes states is exact to float32, x times its decay in three parts. Flops: per token and head
`4 * P * N + 2 * 128 * P`, and `2 * 128 * N` per group. A segment that peeks makes its state alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ssm_update.tpu_decode import split
from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.decode_states import largest_divisor
from pallas_kernels.tpu.mosaic import LANES, Ref
from pallas_kernels.tpu.segment_states import CarriedState, PageBuffers, WholeState
from pallas_kernels.tpu.segments import Field, Segments

CHUNK = LANES  # tokens
_GRID = 4096.0
_MOST_HEADS = 10  # of a trip of the loop over heads, unrolled
_MOST_PEEKING = 40  # of one where the segment peeks


@functools.partial(jax.jit, static_argnames="peeks")
def ssd(
    x: jax.Array,  # [T, H, P]
    states: jax.Array,  # [pages, H, P, N]
    dt: jax.Array,  # float32[T, H] time steps
    a: jax.Array,  # float32[H]
    b: jax.Array,  # [T, G, N]
    c: jax.Array,
    segments: Segments,  # of chunks of `CHUNK` tokens
    *,
    peeks: bool,  # whether some segments do
) -> tuple[jax.Array, jax.Array]:
    """(c . state [T, H, P], right for the tokens of the segments, states)."""
    num_tokens, num_heads, head_dim = x.shape
    num_groups = b.shape[1]
    dtype = jnp.bfloat16 if x.dtype == b.dtype == c.dtype == jnp.bfloat16 else jnp.float32
    padding = [(0, max(0, CHUNK - num_tokens)), (0, 0)]
    lanes = [(0, -num_heads % LANES)]
    x_rows = jnp.pad(x.reshape(num_tokens, -1), padding)
    steps = jnp.pad(dt, [padding[0], *lanes])
    keys, queries = (jnp.pad(y.astype(dtype).reshape(num_tokens, -1), padding) for y in (b, c))
    room = segments.table.shape[0] // len(Field)

    def of_chunk(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((CHUNK, array.shape[1]), lambda i, table: (table[Field.CHUNK * room + i], 0))

    rates = jnp.pad(a[None] * math.log2(math.e), [(0, 0), *lanes])
    results = call(
        functools.partial(_segment, room=room, num_groups=num_groups, peeks=peeks),
        _Refs,
        name=f"ssd_h{_heads(num_heads // num_groups, head_dim)}",
        grid=segments.num_segments,
        scalars={"table": segments.table},
        inputs={
            "x": Operand(x_rows, of_chunk(x_rows)),
            "dt": Operand(steps, of_chunk(steps)),
            "b": Operand(keys, of_chunk(keys)),
            "c": Operand(queries, of_chunk(queries)),
            "a": Operand(rates, pl.BlockSpec((1, steps.shape[1]), lambda i, table: (0, 0))),
        },
        outputs={"out": Operand(jax.ShapeDtypeStruct(x_rows.shape, x.dtype), of_chunk(x_rows))},
        in_place={"states": states},
        scratch={
            "carry": pltpu.VMEM(states.shape[1:], jnp.float32),
            "buffers": PageBuffers.of(states),
            "cum": pltpu.VMEM((1 if dtype == jnp.bfloat16 else 2, CHUNK, steps.shape[1]), jnp.float32),
            "rows": pltpu.VMEM((len(_Rows._fields), num_heads, 1, CHUNK), jnp.float32),
            "scores": pltpu.VMEM((CHUNK, CHUNK), jnp.float32),
        },
        vmem_limit_bytes=48 << 20,
    )
    return results["out"][:num_tokens].reshape(x.shape), results["states"]


def heads_per_tile(head_dim: int) -> int:
    """Heads side by side in 128 lanes."""
    return max(1, LANES // head_dim)


def _heads(heads_per_group: int, head_dim: int, most: int = _MOST_HEADS) -> int:
    """Heads of one trip: whole tiles, which divide a group's."""
    tile = heads_per_tile(head_dim)
    return tile * largest_divisor(heads_per_group // tile, max(1, most // tile))


class _Rows(NamedTuple):
    """A row per head, by token s in lanes."""

    shares: Any  # cum[s] - log2(dt[s]), infinite for tokens of other sequences; float32: its coarse part
    fine: Any  # the rest
    weights: Any  # exp2(cum[last] - cum[s]) * dt[s]
    decay: Any  # exp2(cum[last]) in all lanes


class _Refs(NamedTuple):
    """References of a segment."""

    table: Ref  # SMEM int32[fields * room] of `Segments`
    x: Ref  # [128, H * P]
    dt: Ref  # float32[128, padded H]
    b: Ref  # [128, G * N]
    c: Ref  # [128, G * N]
    a: Ref  # float32[1, padded H]
    out: Ref  # [128, H * P]
    states: Ref  # HBM [pages, H, P, N]
    carry: Ref  # float32[H, P, N]
    buffers: PageBuffers  # of [H, P, N]
    cum: Ref  # float32[parts, 128, padded H] sums of dt * a
    rows: Ref  # float32[fields of `_Rows`, H, 1, 128]
    scores: Ref  # float32[128, 128] c . b of a group


def _segment(refs: _Refs, *, room: int, num_groups: int, peeks: bool) -> None:
    """One segment."""
    state = WholeState(CarriedState.of_grid(refs.table, room, refs.states, refs.buffers), refs.carry)
    state.begin()
    num_heads, head_dim, state_dim = refs.carry.shape
    first, end = state.moves.field(Field.FIRST), state.moves.field(Field.END)
    heads_per_group = num_heads // num_groups

    def compute(peeks: bool) -> None:
        heads = _heads(heads_per_group, head_dim, _MOST_PEEKING if peeks else _MOST_HEADS)
        _prepare(refs, first, end, peeks)

        def group(g: jax.Array, carried: None) -> None:
            lanes = pl.ds(pl.multiple_of(g * state_dim, LANES), state_dim)
            keys = jnp.where(_inside(first, end, (CHUNK, state_dim)), refs.b[:, lanes], jnp.zeros((), refs.b.dtype))
            queries = None if peeks else refs.c[:, lanes]
            if queries is not None:
                refs.scores[...] = _dot(queries, keys, 1, 1)

            def some(n: jax.Array, carried: None) -> None:
                _attend(g * heads_per_group + n * heads, heads, queries, keys, first, end, refs)
                return carried

            return lax.fori_loop(0, heads_per_group // heads, some, carried)

        lax.fori_loop(0, num_groups, group, None)

    state.moves.each(compute, peeks)
    state.end()


def _prepare(refs: _Refs, first: jax.Array, end: jax.Array, peeks: bool) -> None:
    """Sums of `dt * a` over the segment's tokens, and what follows from them, for all heads.

    A segment that peeks needs what is left of tokens and states alone.

    Differences of long sums lose what their terms are worth. The coarse parts of the terms are multiples of `1 / _GRID`
    whose sums are exact, and the sums of the rest are small. For float32 outputs both are kept apart.
    """
    inside = _inside(first, end, refs.dt.shape)
    steps = jnp.where(inside, refs.dt[...], 0.0)
    token = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
    up_to = jnp.where(lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1) <= token, 1.0, 0.0)
    exponents = steps * refs.a[...]
    coarse = jnp.floor(exponents * _GRID) / _GRID
    sums = [_dot(up_to, part, 1, 0) for part in (coarse, exponents - coarse)]
    rows_of = [jnp.transpose(part) for part in sums]  # [padded H, 128]
    total = [jnp.broadcast_to(part[:, CHUNK - 1 :], part.shape) for part in rows_of]
    logs = jnp.log2(jnp.transpose(steps))
    fine = rows_of[1] - logs
    weights = jnp.exp2((total[0] - rows_of[0]) + (total[1] - fine))
    if refs.b.dtype != jnp.float32:
        sums, rows_of = [sums[0] + sums[1]], [rows_of[0] + fine]
    values = _Rows(rows_of[0], fine, weights, jnp.exp2(total[0] + total[1]))
    for i, part in enumerate(() if peeks else sums):
        refs.cum[i] = part
    for i, (name, value) in enumerate(values._asdict().items()):
        for head in range(0 if peeks and name in ("shares", "fine") else refs.rows.shape[1]):
            refs.rows[i, head] = value[head : head + 1]


def _attend(
    head: jax.Array,
    count: int,
    queries: jax.Array | None,  # [128, N] c; None: the segment peeks
    keys: jax.Array,  # [128, N] b, 0 outside the segment
    first: jax.Array,
    end: jax.Array,
    refs: _Refs,
) -> None:
    """Outputs and states of `count` heads from `head` on."""
    x, out, carry = refs.x, refs.out, refs.carry
    after = refs.buffers.going if queries is None else carry
    _, head_dim, state_dim = carry.shape
    tile = heads_per_tile(head_dim)
    width = tile * head_dim
    sums = [  # these heads in the first lanes
        pltpu.roll(refs.cum[i], refs.cum.shape[2] - head, 1) for i in range(refs.cum.shape[0])
    ]
    inside = _inside(first, end, (CHUNK, width))
    started = lax.broadcasted_iota(jnp.int32, inside.shape, 0) >= first  # rows after `end` are written again
    for k in range(0, count, tile):
        columns = [[_column(part, k + h) for part in sums] for h in range(tile)]
        rows = [_Rows(*(refs.rows[i, head + k + h] for i in range(len(_Rows._fields)))) for h in range(tile)]
        lanes = pl.ds(pl.multiple_of((head + k) * head_dim, width), width)
        inputs = jnp.where(inside, x[:, lanes].astype(jnp.float32), 0.0)
        if queries is not None:
            state = carry[pl.ds(head + k, tile)].reshape(width, state_dim)
            y = _within(refs.scores[...], inputs, columns, rows, head_dim, queries.dtype)
            y = y + _entry(columns, head_dim) * _dot(queries, state.astype(queries.dtype), 1, 1)
            y = jnp.where(started, y, out[:, lanes].astype(jnp.float32))
            out[:, lanes] = y.astype(out.dtype)
        added = _added(inputs, keys, rows, head_dim)
        for h in range(tile):
            decay = _wide(rows[h].decay, state_dim)
            state = carry[head + k + h] * decay + added[h * head_dim : (h + 1) * head_dim]
            after[head + k + h] = state.astype(after.dtype)


def _within(
    scores: jax.Array,  # float32[128, 128] c . b
    inputs: jax.Array,  # float32[128, heads * P] side by side
    columns: list[list[jax.Array]],  # of each head, parts of cum
    rows: list[_Rows],
    head_dim: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """float32[128, heads * P] what the segment's tokens give each other: one product over the tokens of all heads."""
    token = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    seen = lax.broadcasted_iota(jnp.int32, scores.shape, 1) <= token
    head = lax.div(lax.broadcasted_iota(jnp.int32, inputs.shape, 1), head_dim)
    shares, values = [], []
    for h, (column, row) in enumerate(zip(columns, rows, strict=True)):
        exponent = column[0] - row.shares
        if len(column) == 2:
            exponent = exponent + (column[1] - row.fine)
        shares.append((scores * jnp.exp2(jnp.where(seen, exponent, -jnp.inf))).astype(dtype))
        values.append((inputs if len(rows) == 1 else jnp.where(head == h, inputs, 0.0)).astype(dtype))
    return _dot(jnp.concatenate(shares, axis=1), jnp.concatenate(values), 1, 0)


def _entry(columns: list[list[jax.Array]], head_dim: int) -> jax.Array:
    """float32[128, heads * P] what is left of the state before the segment at each token."""
    width = len(columns) * head_dim
    parts = [_wide(sum(column[1:], column[0]), width) for column in columns]
    head = lax.div(lax.broadcasted_iota(jnp.int32, (CHUNK, width), 1), head_dim)
    exponent = parts[0]
    for h, part in enumerate(parts[1:], 1):
        exponent = jnp.where(head >= h, part, exponent)
    return jnp.exp2(exponent)


def _added(inputs: jax.Array, keys: jax.Array, rows: list[_Rows], head_dim: int) -> jax.Array:
    """float32[heads * P, N] what the segment adds to the states."""
    across = jnp.transpose(inputs)
    parts = [across[h * head_dim : (h + 1) * head_dim] * row.weights for h, row in enumerate(rows)]
    weighted = jnp.concatenate(parts)
    if keys.dtype == jnp.float32:
        return _dot(weighted, keys, 1, 0)
    return _dot(jnp.concatenate(split(weighted), axis=1), jnp.concatenate([keys] * 3), 1, 0)


def _column(x: jax.Array, lane: int) -> jax.Array:
    """A lane of x [128, lanes] in 128 lanes."""
    return jnp.broadcast_to(x[:, lane : lane + 1], (CHUNK, LANES))


def _inside(first: jax.Array, end: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """bool of this shape: whether the token, along axis 0, is of the segment."""
    token = lax.broadcasted_iota(jnp.int32, shape, 0)
    return (token >= first) & (token < end)


def _wide(x: jax.Array, count: int) -> jax.Array:
    """x [rows, 128], equal in all lanes, as [rows, count]."""
    return x[:, :count] if count <= LANES else jnp.concatenate([x] * (count // LANES), axis=1)


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Matrix product in float32 that sums over these axes."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)

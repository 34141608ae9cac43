"""selective_scan of Mamba 1 for TPU, sequences of several tokens: token by token, over all channels and state numbers.

Flow:    x, time steps, b, c of the step, segments -> [scan] -> (outputs, states in place)
Source:  Mamba (arXiv 2312.00752, section 3.3): decays differ in every channel and number, so no matrix product helps

Grid: one step per segment (`tpu_plan`). The first of a chunk spreads the chunk's inputs so that a register holds 1,024
channels of one token. A register of the state then holds the same channels of one number n: it needs neither a
broadcast nor a sum over a register's numbers, as `b[t, n]` and `c[t, n]` are scalars. For 1,024 channels at a time the
state stays in registers over all tokens; eight tokens are unrolled. Operations bind: for each token, 1,024 channels and
number six of the vector unit, an exponential and two loads of scalars.
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

from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Ref
from pallas_kernels.tpu.segment_states import CarriedState, PageBuffers
from pallas_kernels.tpu.segments import Field, Segments

_ROWS = 16  # tokens spread at a time: a tile of bfloat16
_UNROLLED = 8  # tokens


def chunk_tokens(num_channels: int) -> int:
    """Tokens of a chunk: 16 to 128, so that one of float32 takes about 2 MiB."""
    return max(_ROWS, min(128, (1 << 19) // num_channels // _ROWS * _ROWS))


@jax.jit
def scan(
    x: jax.Array,  # [T, H]
    states: jax.Array,  # [pages, N, H]; in slabs, a page as `PlaceInSlab.stored_shape` says
    dt: jax.Array,  # float32[T, H] time steps
    a: jax.Array,  # float32[N, H]
    b: jax.Array,  # [T, N]
    c: jax.Array,
    segments: Segments,  # of chunks of `chunk_tokens(H)` tokens
) -> tuple[jax.Array, jax.Array]:
    """(c . state [T, H], right for the tokens of the segments, states)."""
    num_tokens, num_channels = x.shape
    state_dim = a.shape[0]
    chunk = chunk_tokens(num_channels)
    num_chunks = pl.cdiv(num_tokens, chunk)
    padding = [(0, num_chunks * chunk - num_tokens), (0, 0)]
    scalars = jnp.pad(jnp.concatenate([b, c], axis=1).astype(jnp.float32), padding).reshape(num_chunks, 1, -1)
    rows = num_channels // LANES
    padded_rows = rows + -rows % SUBLANES
    rates = (a * math.log2(math.e)).reshape(state_dim, rows, LANES)
    rates = jnp.pad(rates, [(0, 0), (0, padded_rows - rows), (0, 0)])
    room = segments.table.shape[0] // len(Field)
    tokens = pl.BlockSpec((chunk, num_channels), lambda i, table: (table[Field.CHUNK * room + i], 0))
    scalars_spec = pl.BlockSpec(
        (1, 1, scalars.shape[2]), lambda i, table: (table[Field.CHUNK * room + i], 0, 0), memory_space=pltpu.SMEM
    )
    spread = pltpu.VMEM((chunk // _ROWS, _ROWS * padded_rows, LANES), jnp.float32)
    x = jnp.pad(x, padding) if num_chunks == 1 else x
    dt = jnp.pad(dt, padding) if num_chunks == 1 else dt
    results = call(
        functools.partial(_segment, room=room),
        _Refs,
        name=f"scan_c{chunk}",
        grid=segments.num_segments,
        scalars={"table": segments.table},
        inputs={
            "x": Operand(x, tokens),
            "dt": Operand(dt, tokens),
            "scalars": Operand(scalars, scalars_spec),
            "rates": Operand(rates, pl.BlockSpec(rates.shape, lambda i, table: (0, 0, 0))),
        },
        outputs={"out": Operand(jax.ShapeDtypeStruct(x.shape, x.dtype), tokens)},
        in_place={"states": states},
        scratch={
            "inflow": spread,
            "steps": spread,
            "seen": spread,
            "carry": pltpu.VMEM((state_dim, padded_rows, LANES), jnp.float32),
            "buffers": PageBuffers.of(states),
        },
        vmem_limit_bytes=48 << 20,
    )
    return results["out"][:num_tokens], results["states"]


class _Refs(NamedTuple):
    """References of a segment."""

    table: Ref  # SMEM int32[fields * room] of `Segments`
    x: Ref  # [chunk, H]
    dt: Ref  # float32[chunk, H]
    scalars: Ref  # float32[1, 1, chunk * 2 * N] in SMEM: b and c of each token
    rates: Ref  # float32[N, rows, 128] a in base 2
    out: Ref  # [chunk, H]
    states: Ref  # HBM [pages, N, H]; in slabs [pages, H / 128, N, 128]
    inflow: Ref  # float32[chunk / 16, 16 * rows, 128] dt * x, the rows of a token together
    steps: Ref  # of dt
    seen: Ref  # of the outputs
    carry: Ref  # float32[N, rows, 128]
    buffers: PageBuffers  # of a page


def _segment(refs: _Refs, *, room: int) -> None:
    """One segment."""
    carry, scalars, rates = refs.carry, refs.scalars, refs.rates
    moves = CarriedState.of_grid(refs.table, room, refs.states, refs.buffers)
    coming, going = refs.buffers.coming, refs.buffers.going

    def take() -> None:
        for row, place in _rows_of(coming):
            carry[:, row] = coming[place].astype(jnp.float32)

    def clear() -> None:
        carry[...] = jnp.zeros_like(carry)

    def give() -> None:
        for row, place in _rows_of(going):
            going[place] = carry[:, row].astype(going.dtype)

    pl.when(moves.begins_chunk)(lambda: _spread(refs.x, refs.dt, refs.inflow, refs.steps))
    moves.begin(take, clear)
    first, end = moves.field(Field.FIRST), moves.field(Field.END)
    whole = pl.cdiv(first, _UNROLLED), jnp.maximum(lax.div(end, _UNROLLED), pl.cdiv(first, _UNROLLED))

    def channels(g: jax.Array, carried: None) -> None:
        own = pl.ds(pl.multiple_of(g * SUBLANES, SUBLANES), SUBLANES)
        state_dim = carry.shape[0]
        rate = [rates[n, own] for n in range(state_dim)]

        def token(t: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            place = _place(t, g, carry.shape[1])
            step, added = refs.steps[place], refs.inflow[place]
            after, total = [], jnp.zeros_like(step)
            for n in range(state_dim):
                scalar = t * 2 * state_dim + n
                after.append(jnp.exp2(step * rate[n]) * state[n] + added * scalars[0, 0, scalar])
                total = total + after[n] * scalars[0, 0, scalar + state_dim]
            refs.seen[place] = total
            return tuple(after)

        def tokens(n: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for k in range(_UNROLLED):
                state = token(n * _UNROLLED + k, state)
            return state

        state = tuple(carry[n, own] for n in range(state_dim))
        state = lax.fori_loop(first, jnp.minimum(whole[0] * _UNROLLED, end), token, state)
        state = lax.fori_loop(*whole, tokens, state)
        state = lax.fori_loop(jnp.minimum(whole[1] * _UNROLLED, end), end, token, state)
        for n in range(state_dim):
            carry[n, own] = state[n]
        return carried

    lax.fori_loop(0, carry.shape[1] // SUBLANES, channels, None)
    _gather(refs.seen, refs.out, first, end)
    moves.end(give)


def _rows_of(page: Ref) -> list[tuple[int, tuple[Any, ...]]]:
    """(row, where they are) of each 128 channels of a page [N, H] or, in slabs, [H / 128, N, 128]."""
    if len(page.shape) == 3:
        return [(row, (row,)) for row in range(page.shape[0])]
    return [(row, (slice(None), slice(row * LANES, (row + 1) * LANES))) for row in range(page.shape[1] // LANES)]


def _place(t: jax.Array, g: jax.Array, num_rows: int) -> tuple[jax.Array, pl.Slice]:
    """Where the g-th 1,024 channels of a token stand in a spread array."""
    within = lax.rem(t, _ROWS) * num_rows + g * SUBLANES
    return lax.div(t, _ROWS), pl.ds(pl.multiple_of(within, SUBLANES), SUBLANES)


def _spread(x: Ref, dt: Ref, inflow: Ref, steps: Ref) -> None:
    """Fills the spread arrays from blocks [chunk, H]."""
    stride = inflow.shape[1] // _ROWS

    def some(n: jax.Array, carry: None) -> None:
        tokens = pl.ds(pl.multiple_of(n * _ROWS, _ROWS), _ROWS)
        for row in range(x.shape[1] // LANES):
            lanes = slice(row * LANES, (row + 1) * LANES)
            step = dt[tokens, lanes]
            steps.at[n][pl.ds(row, _ROWS, stride=stride), :] = step
            inflow.at[n][pl.ds(row, _ROWS, stride=stride), :] = step * x[tokens, lanes].astype(jnp.float32)
        return carry

    lax.fori_loop(0, inflow.shape[0], some, None)


def _gather(seen: Ref, out: Ref, first: jax.Array, end: jax.Array) -> None:
    """The outputs of the segment's tokens, [chunk, H], and of those beside it: done before, or written again."""
    stride = seen.shape[1] // _ROWS

    def some(n: jax.Array, carry: None) -> None:
        tokens = pl.ds(pl.multiple_of(n * _ROWS, _ROWS), _ROWS)
        for row in range(out.shape[1] // LANES):
            lanes = slice(row * LANES, (row + 1) * LANES)
            out[tokens, lanes] = seen.at[n][pl.ds(row, _ROWS, stride=stride), :].astype(out.dtype)
        return carry

    lax.fori_loop(lax.div(first, _ROWS), pl.cdiv(end, _ROWS), some, None)

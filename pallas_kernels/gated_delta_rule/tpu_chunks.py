"""gated_delta_rule for TPU, sequences of several tokens: matrix products over chunks of 64, the state in between.

Flow:    `prepared` inputs of the step, segments -> [delta_chunks] -> (outputs, states in place)
Source:  the WY form as `reference` states it

Grid: one step per segment (`tpu.segments`), the part of a sequence in a chunk; the state stays in VMEM from one to the
next. A step reads the chunk's inputs and writes its outputs, and goes over the heads, four side by side. Sums of decays
are products with matrices of ones, so that no difference of sums is taken. A decay per head goes into the products of
keys as a matrix. A decay per number of the key goes in as factors of both sides, for each border between halves of
blocks. The matrix of deltas is inverted by blocks along its diagonal, each time of twice the size. All products are
exact to float32.

A segment that peeks has no outputs; its state goes to a page, and the next segment starts from the one before.

Flops per head and chunk of C tokens: `6 * C * K * V` with the state, `2 * C * C * (2 * K + V)` within, `20 * C**3` for
the inverse. Tokens of other sequences in the chunk come as zeros, which change nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta_rule.arguments import Inputs
from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.decode_states import largest_divisor
from pallas_kernels.tpu.mosaic import LANES, Ref
from pallas_kernels.tpu.segment_states import CarriedState, PageBuffers, WholeState
from pallas_kernels.tpu.segments import Field, Segments

CHUNK = 64  # tokens
_MOST_HEADS = 4  # of a trip of the loop over heads
_MOST_PEEKING = 8  # of one where the segment peeks
_LEAST_GATE = -100.0  # leaves nothing in float32, and nothing times it is nothing


@functools.partial(jax.jit, static_argnames="peeks")
def delta_chunks(
    inputs: Inputs,  # `reference.prepared`: q and k [T, G, K] normed, q scaled; float32
    states: jax.Array,  # [pages, H, K, V]
    segments: Segments,  # of chunks of `CHUNK` tokens
    *,
    peeks: bool,  # whether some segments do
) -> tuple[jax.Array, jax.Array]:
    """(outputs float32[T, H, V], right for the tokens of the segments, states)."""
    num_tokens, num_heads, _ = inputs.v.shape
    is_per_channel = inputs.g.shape[2] > 1
    per_head = [(0, max(0, CHUNK - num_tokens)), (0, -num_heads % LANES)]
    wide = [per_head[0], (0, 0)]
    flat = inputs._replace(**{name: getattr(inputs, name).reshape(num_tokens, -1) for name in ("q", "k", "v", "g")})
    tokens = Inputs(
        q=jnp.pad(flat.q, wide),
        k=jnp.pad(flat.k, wide),
        v=jnp.pad(flat.v, wide),
        g=jnp.pad(flat.g, wide if is_per_channel else per_head),
        beta=jnp.pad(flat.beta, per_head),
    )
    room = segments.table.shape[0] // len(Field)

    def of_chunk(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((CHUNK, array.shape[1]), lambda i, table: (table[Field.CHUNK * room + i], 0))

    decay = None if is_per_channel else pltpu.VMEM((CHUNK, tokens.g.shape[1]), jnp.float32)
    results = call(
        functools.partial(_segment, room=room, peeks=peeks),
        _Refs,
        name="delta_chunks",
        grid=segments.num_segments,
        scalars={"table": segments.table},
        inputs={name: Operand(x, of_chunk(x)) for name, x in tokens._asdict().items()},
        outputs={"out": Operand(jax.ShapeDtypeStruct(tokens.v.shape, jnp.float32), of_chunk(tokens.v))},
        in_place={"states": states},
        scratch={
            "carry": pltpu.VMEM(states.shape[1:], jnp.float32),
            "buffers": PageBuffers.of(states),
            "entry": decay,
            "exit": decay,
        },
        vmem_limit_bytes=48 << 20,
    )
    return results["out"][:num_tokens].reshape(inputs.v.shape), results["states"]


class _Refs(NamedTuple):
    """References of a segment; float32 but for states in their pages."""

    table: Ref  # SMEM int32[fields * room] of `Segments`
    q: Ref  # [64, G * K]
    k: Ref  # [64, G * K]
    v: Ref  # [64, H * V]
    g: Ref  # [64, padded H], or of a decay per channel [64, H * K]
    beta: Ref  # [64, padded H]
    out: Ref  # [64, H * V]
    states: Ref  # HBM [pages, H, K, V]
    carry: Ref  # [H, K, V]
    buffers: PageBuffers  # of [H, K, V]
    entry: Ref | None  # [64, padded H] what is left of the state before the segment; None: a decay per channel
    exit: Ref | None  # [64, padded H] what is left of a token at the segment's end


def _segment(refs: _Refs, *, room: int, peeks: bool) -> None:
    """One segment."""
    state = WholeState(CarriedState.of_grid(refs.table, room, refs.states, refs.buffers), refs.carry)
    state.begin()
    num_heads, key_dim, _ = refs.carry.shape
    key_heads = refs.k.shape[1] // key_dim
    segment = (state.moves.field(Field.FIRST), state.moves.field(Field.END))
    if refs.entry is not None and refs.exit is not None:
        refs.entry[...], refs.exit[...] = _decays(_gates(refs.g[...], segment))

    group = num_heads // key_heads

    def compute(peeks: bool) -> None:
        most = _MOST_PEEKING if peeks else _MOST_HEADS
        keys_per_trip = largest_divisor(key_heads, max(1, most // group))

        def some(n: jax.Array, carried: None) -> None:
            heads = [_heads_of(n * keys_per_trip + i, group, segment, refs, peeks) for i in range(keys_per_trip)]
            _attend([head for of_key in heads for head in of_key], segment, refs, peeks)
            return carried

        lax.fori_loop(0, key_heads // keys_per_trip, some, None)

    state.moves.each(compute, peeks)
    state.end()


class _Head(NamedTuple):
    """A value head's part in a segment; 0 for tokens outside."""

    number: jax.Array
    entry: jax.Array  # [128, K] queries and below them keys, as they see the state before the segment; peeks: keys
    exit: jax.Array  # [64, K] keys as they add to the state after it
    kept: jax.Array  # [K, V] what is left of the state
    rates: jax.Array  # [64, V] beta, the same in all lanes
    values: jax.Array  # [64, V]
    of_keys: jax.Array  # [64, 64] decayed products of keys with keys
    of_queries: jax.Array  # and of queries with keys


def _heads_of(
    key_head: jax.Array, group: int, segment: tuple[jax.Array, jax.Array], refs: _Refs, peeks: bool
) -> list[_Head]:
    """The value heads of a key head."""
    key_dim, value_dim = refs.carry.shape[1:]
    keys, queries = (_inside(x[:, _lanes(key_head, key_dim)], segment) for x in (refs.k, refs.q))
    within = None if refs.entry is None else (_dot(keys, keys, 1, 1), _dot(queries, keys, 1, 1))
    heads = []
    for head in (key_head * group + h for h in range(group)):
        rates = _inside(_column(refs.beta, head, value_dim), segment)
        values = _inside(refs.v[:, _lanes(head, value_dim)], segment)
        if within is None:
            gates = _gates(refs.g[:, _lanes(head, key_dim)], segment)
            entry, exit = _decays(gates)
            kept = jnp.exp(_dot(gates, jnp.ones(values.shape, jnp.float32), 0, 0))
            products = _products_per_channel(keys, queries, gates)
        else:
            entry, exit = (_column(x, head, key_dim) for x in (refs.entry, refs.exit))
            kept = jnp.broadcast_to(entry[CHUNK - 1 :, :1], (key_dim, value_dim))
            decay = _decay_between(_gates(_column(refs.g, head, CHUNK), segment))
            products = (within[0] * decay, within[1] * decay)
        seen = keys * entry if peeks else jnp.concatenate([queries * entry, keys * entry])
        heads.append(_Head(head, seen, keys * exit, kept, rates, values, *products))
    return heads


def _attend(heads: list[_Head], segment: tuple[jax.Array, jax.Array], refs: _Refs, peeks: bool) -> None:
    """Outputs and states of some heads, step by step for all of them: what one waits for is hidden by the others.

    A segment that `peeks` has no outputs.
    """
    after = refs.buffers.going if peeks else refs.carry
    inverses = _inverses([head.rates[:, :CHUNK] * head.of_keys for head in heads])
    states = [refs.carry[head.number] for head in heads]
    old = [_dot(head.entry, state, 1, 0) for head, state in zip(heads, states, strict=True)]
    right = [head.rates * (head.values - x[-CHUNK:]) for head, x in zip(heads, old, strict=True)]
    deltas = [_dot(inverse, x, 1, 0) for inverse, x in zip(inverses, right, strict=True)]
    for head, state, x, delta in zip(heads, states, old, deltas, strict=True):
        if not peeks:
            y = x[:CHUNK] + _dot(head.of_queries, delta, 1, 0)
            own = _lanes(head.number, y.shape[1])
            started = lax.broadcasted_iota(jnp.int32, y.shape, 0) >= segment[0]  # rows after it are written again
            refs.out[:, own] = jnp.where(started, y, refs.out[:, own])
        state = head.kept * state + _dot(head.exit, delta, 0, 0)
        after[head.number] = state.astype(after.dtype)


def _gates(g: jax.Array, segment: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Gates [64, lanes] of the segment's tokens, 0 for others, finite where they forget all."""
    return jnp.maximum(_inside(g, segment), _LEAST_GATE)


def _decays(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[64, lanes] what is left at each token of the state before the chunk; and of the token at the chunk's end."""
    row, column = _places()
    entry, exit = (jnp.exp(_dot(_ones(seen), gates, 1, 0)) for seen in (column <= row, column > row))
    return entry, exit


def _decay_between(gates: jax.Array) -> jax.Array:
    """[64, 64] what is left of token s at token t >= s, else 0, from gates that are the same in all 64 lanes."""
    row, column = _places()
    sums = _dot(_ones(column <= row), jnp.where(row > column, gates, 0.0), 1, 0)
    return jnp.where(column <= row, jnp.exp(sums), 0.0)


def _products_per_channel(keys: jax.Array, queries: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[64, 64] products of keys, and of queries, with decayed keys of tokens before; of queries with their own key."""
    row, column = _places()
    of_keys = jnp.zeros(row.shape, jnp.float32)
    of_queries = jnp.where(row == column, jnp.broadcast_to(jnp.sum(queries * keys, 1, keepdims=True), row.shape), 0.0)
    for half in _halves():
        border = (row & -(2 * half)) + half  # first token of the second half of the row's block
        to_border = (row < border) & (column > row) & (column < border)
        from_border = (row >= border) & (column >= border) & (column <= row)
        decay = jnp.exp(_dot(_ones(to_border | from_border), gates, 1, 0))
        across = _across(row, column, half)
        decayed = keys * decay
        of_keys = jnp.where(across, _dot(decayed, decayed, 1, 1), of_keys)
        of_queries = jnp.where(across, _dot(queries * decay, decayed, 1, 1), of_queries)
    return of_keys, of_queries


def _inverses(lower: list[jax.Array]) -> list[jax.Array]:
    """Inverses of I + the strictly lower parts of [64, 64]: blocks along the diagonal, each time of twice the size."""
    row, column = _places()
    inverses = [_ones(row == column)] * len(lower)
    for half in _halves():
        across = _across(row, column, half)
        corners = [jnp.where(across, x, 0.0) for x in lower]
        if half > 1:
            corners = [_dot(inverse, x, 1, 0) for inverse, x in zip(inverses, corners, strict=True)]
            corners = [_dot(x, inverse, 1, 0) for inverse, x in zip(inverses, corners, strict=True)]
        inverses = [inverse - x for inverse, x in zip(inverses, corners, strict=True)]
    return inverses


def _halves() -> tuple[int, ...]:
    """Sizes of the halves of blocks."""
    return tuple(1 << n for n in range(CHUNK.bit_length() - 1))


def _across(row: jax.Array, column: jax.Array, half: int) -> jax.Array:
    """Whether a row is in the second half, and the column in the first half, of the same block."""
    return ((row & -(2 * half)) == (column & -(2 * half))) & ((row & half) != 0) & ((column & half) == 0)


def _places() -> tuple[jax.Array, jax.Array]:
    """int32[64, 64] rows and columns."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in range(2))
    return row, column


def _ones(where: jax.Array) -> jax.Array:
    return jnp.where(where, 1.0, 0.0)


def _inside(x: jax.Array, segment: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [64, lanes], 0 for tokens outside the segment."""
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((token >= segment[0]) & (token < segment[1]), x, 0.0)


def _column(ref: Ref, lane: jax.Array, count: int) -> jax.Array:
    """A lane of [64, lanes] in `count` lanes."""
    rolled = pltpu.roll(ref[...], ref.shape[1] - lane, 1)
    return jnp.broadcast_to(rolled[:, :1], (CHUNK, count))


def _lanes(index: jax.Array, size: int) -> pl.Slice:
    return pl.ds(pl.multiple_of(index * size, LANES), size)


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Matrix product in float32 that sums over these axes."""
    dimensions = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

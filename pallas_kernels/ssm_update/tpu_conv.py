"""causal_conv1d for TPU: one pass over the new tokens of sequences that bring several, in chunks.

Flow:    x, the inputs before each sequence -> [causal_conv1d] -> (out, states)

Decode tokens are elementwise sums, which XLA makes one fusion of. XLA also reads and writes the states: it lays
[pages, C, W - 1] out as W - 1 arrays [pages, C], so that a page is one sublane of a tile, which no DMA can address; its
gather and scatter move the rows of the step's pages alone and update donated states in place. States in slabs are rows
of their own, which DMAs move.

Grid: channel tiles x segments (`tpu_plan`). A step reads a chunk's tokens once, keeps them in float32 after the last
W - 1 inputs before them, and multiplies shifted rows of those. Bytes: x and out; flops 2 * W * T * C.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_ops.tpu_states import array_of, by_dma
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.ssm_update.arguments import Convolution
from pallas_kernels.ssm_update.reference import ConvInputs
from pallas_kernels.state_step import StateStep, StepArrays, with_states
from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, Ref
from pallas_kernels.tpu.segments import Field, num_decode_tokens, plan_segments
from pallas_kernels.tpu.slab_refs import as_stored, reason_of_slab_rows

_CHUNK = 256  # tokens
_MOST_CHANNELS = 1024  # of a tile
_ROWS = 16  # tokens of one trip: a tile of bfloat16
_MOST_TAPS = SUBLANES + 1  # the inputs before a chunk fill one tile of rows


def reason_not_supported(x: jax.Array, states: jax.Array, weight: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if x.shape[1] % LANES:
        return f"TPU kernels take channels in multiples of {LANES}, got {x.shape[1]}"
    if weight.shape[1] > _MOST_TAPS:
        return f"TPU kernels take up to {_MOST_TAPS} taps, got {weight.shape[1]}"
    if jnp.float16 in (x.dtype, states.dtype):
        return "TPU has no arithmetic on float16; use bfloat16"
    if isinstance(states, SlabArray) and not states.place.packs:
        return "TPU kernels read packed states in slabs; make them by places_of(packs=True)"
    return reason_of_slab_rows(states)


@functools.partial(jax.jit, static_argnames=("activation", "chunk"))
def causal_conv1d(
    arguments: Convolution,
    states: jax.Array,  # [pages, C, W - 1]
    arrays: StepArrays,
    *,
    activation: str | None,
    chunk: int = _CHUNK,  # most tokens of a chunk, a multiple of 16
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, weight, bias = arguments
    num_tokens, num_channels = x.shape
    step = StateStep.of(num_tokens, arrays)
    inputs = ConvInputs(x, _inputs_of(states, step.read), step)
    taps = weight.T.astype(jnp.float32)
    offset = jnp.zeros(num_channels, jnp.float32) if bias is None else bias.astype(jnp.float32)
    num_decode = num_decode_tokens(step, arrays.distribution)
    decoded = _decode(inputs, taps, offset, activation)
    out = decoded
    if num_tokens > 1:
        out = _segments(inputs, taps, offset, arrays.distribution, activation, chunk)
        decoded = jnp.pad(decoded, [(0, num_tokens - decoded.shape[0]), (0, 0)])
        out = jnp.where((jnp.arange(num_tokens) < num_decode)[:, None], decoded, out)
    return jnp.where((step.place >= 0)[:, None], out, 0).astype(x.dtype), _written(states, inputs)


def _inputs_of(states: jax.Array, pages: jax.Array) -> jax.Array:
    """[S, W - 1, C] of the states in pages int32[S]."""
    if not isinstance(states, SlabArray):
        return states[pages].swapaxes(1, 2)
    _, num_channels, num_inputs = states.shape
    by_lanes = by_dma(as_stored(states))[pages]  # [S, C / 128, W - 1, 128]
    return by_lanes.swapaxes(1, 2).reshape(-1, num_inputs, num_channels)


def _written(states: jax.Array, inputs: ConvInputs) -> jax.Array:
    """`states` after the step."""
    if not isinstance(states, SlabArray):
        return inputs.written(states)
    last = inputs.last.astype(states.dtype)
    by_lanes = last.reshape(*last.shape[:3], -1, LANES).swapaxes(2, 3)
    written = array_of(with_states(by_dma(as_stored(states)), inputs.step.pages, by_lanes))
    return replace(states, memory=written.memory)


def _decode(inputs: ConvInputs, taps: jax.Array, offset: jax.Array, activation: str | None) -> jax.Array:
    """Outputs of the first tokens, right for decode tokens: each has all but the last input in its state."""
    count = min(inputs.new.shape[0], inputs.step.q_lens.shape[0])
    old = inputs.old[inputs.step.seq[:count]].astype(jnp.float32)
    out = offset + jnp.sum(taps[:-1] * old, axis=1) + taps[-1] * inputs.new[:count].astype(jnp.float32)
    return (jax.nn.silu(out) if activation == "silu" else out).astype(inputs.new.dtype)


def _segments(
    inputs: ConvInputs,
    taps: jax.Array,  # float32[W, C]
    offset: jax.Array,  # float32[C]
    distribution: jax.Array,
    activation: str | None,
    chunk: int,
) -> jax.Array:
    """Outputs [T, C] of the tokens of all but the decode sequences; the rest is undefined."""
    num_tokens, num_channels = inputs.new.shape
    chunk = min(chunk, -(-num_tokens // _ROWS) * _ROWS)
    whole = inputs.step._replace(checkpoints=None)  # what a sequence leaves on its way is inputs, no output of this
    segments = plan_segments(whole, distribution, num_tokens, chunk)
    room = segments.table.shape[0] // len(Field)
    width = max(n for n in range(LANES, min(_MOST_CHANNELS, num_channels) + 1, LANES) if num_channels % n == 0)
    num_taps = taps.shape[0]
    old = jnp.pad(inputs.old.astype(jnp.float32), [(0, 0), (SUBLANES - (num_taps - 1), 0), (0, 0)])

    def of_channels(tile: jax.Array, i: jax.Array, table: Ref) -> tuple[jax.Array | int, ...]:
        return 0, tile

    def of_tokens(tile: jax.Array, i: jax.Array, table: Ref) -> tuple[jax.Array | int, ...]:
        return table[Field.CHUNK * room + i], tile

    def of_sequence(tile: jax.Array, i: jax.Array, table: Ref) -> tuple[jax.Array | int, ...]:
        return table[Field.SEQ * room + i], 0, tile

    tokens = pl.BlockSpec((chunk, width), of_tokens)
    return call(
        functools.partial(_segment, room=room, activation=activation),
        _Refs,
        name=f"conv1d_c{chunk}",
        grid=(num_channels // width, segments.num_segments),
        scalars={"table": segments.table},
        inputs={
            "x": Operand(inputs.new, tokens),
            "old": Operand(old, pl.BlockSpec((1, SUBLANES, width), of_sequence)),
            "taps": Operand(taps, pl.BlockSpec((num_taps, width), of_channels)),
            "offset": Operand(offset[None], pl.BlockSpec((1, width), of_channels)),
        },
        outputs={"out": Operand(jax.ShapeDtypeStruct(inputs.new.shape, inputs.new.dtype), tokens)},
        scratch={"rows": pltpu.VMEM((SUBLANES + chunk, width), jnp.float32)},
        vmem_limit_bytes=32 << 20,
    )["out"]


class _Refs(NamedTuple):
    """References of a segment and a channel tile."""

    table: Ref  # SMEM int32[fields * room] of `Segments`
    x: Ref  # [chunk, width]
    old: Ref  # float32[1, 8, width] the inputs before the sequence, the last W - 1 rows
    taps: Ref  # float32[W, width]
    offset: Ref  # float32[1, width]
    out: Ref  # [chunk, width]
    rows: Ref  # float32[8 + chunk, width] inputs before the chunk, and of it


def _segment(refs: _Refs, *, room: int, activation: str | None) -> None:
    """One segment of one channel tile."""
    table, x, old, taps, offset, out, rows = refs
    i, num_taps = pl.program_id(1), taps.shape[0]
    chunk = x.shape[0]
    first, end = table[Field.FIRST * room + i], table[Field.END * room + i]
    before = table[Field.CHUNK * room + jnp.maximum(i - 1, 0)]

    @pl.when((i == 0) | (table[Field.CHUNK * room + i] != before))
    def _() -> None:
        rows[:SUBLANES] = rows[chunk:]
        rows[SUBLANES:] = x[...].astype(jnp.float32)

    @pl.when(table[Field.BEGINS * room + i] == 1)
    def _() -> None:  # over the last inputs of the sequence before, which is done
        for n in range(1, num_taps):
            rows[pl.ds(SUBLANES + first - n, 1), :] = old[0, SUBLANES - n : SUBLANES - n + 1]

    def some(n: jax.Array, carry: None) -> None:
        start = pl.multiple_of(n * _ROWS, _ROWS)
        window = rows[pl.ds(start, SUBLANES + _ROWS), :]  # with the inputs before: loads start at whole tiles
        y = jnp.broadcast_to(offset[...], (_ROWS, x.shape[1]))
        for tap in range(num_taps):
            shift = SUBLANES - (num_taps - 1) + tap
            y = y + taps[tap : tap + 1] * window[shift : shift + _ROWS]
        y = jax.nn.silu(y) if activation == "silu" else y
        row = start + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        own = pl.ds(start, _ROWS)  # rows before are another's; those after, the next segment writes again
        out[own, :] = jnp.where(row >= first, y, out[own, :].astype(jnp.float32)).astype(out.dtype)
        return carry

    lax.fori_loop(first // _ROWS, pl.cdiv(end, _ROWS), some, None)

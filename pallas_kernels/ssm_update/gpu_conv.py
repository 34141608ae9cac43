"""causal_conv1d on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU: a window of inputs in registers, channels in threads.

Flow:    api -> [causal_conv1d] -> pieces of sequences -> one launch -> (out, states in place)

Grid: pieces x tiles of 128 channels; a thread block is one warpgroup, a thread has one channel. A *piece* is up to 64
new tokens of one sequence. It begins with the W - 1 inputs before it: the sequence's first piece takes them from the
page, others from the tokens before. The first piece also leaves the state, so that thread blocks need not wait for each
other: who writes a page is the only one that reads it. Padding is a sequence of its own, without states, whose outputs
are 0.

Bytes: x and out once, and a page's channels read and written once for each sequence; memory binds. A page is
[C, W - 1], so that a tap of neighbouring channels is strided: its sectors are read W - 1 times, the first time from
memory. Inputs of several tokens are loaded together, since the window alone would wait for each.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu
from pallas_kernels.ssm_update.arguments import Convolution, StepArrays
from pallas_kernels.ssm_update.reference import StateStep

_CHANNELS = 128  # of a thread block
_PIECE = 64  # tokens
_MOST_TAPS = 9
_TOKENS = 8  # whose inputs are loaded together


class Field(enum.IntEnum):
    """Scalars of a piece."""

    TOKEN = 0  # its first
    COUNT = 1  # of its tokens, 0: no piece
    PLACE = 2  # of its first among the new tokens of the sequence
    LEFT = 3  # of these from it on
    READ = 4  # page, where it begins its sequence
    WRITE = 5  # page for the state after the whole sequence, where it begins that; 0: none
    IS_PADDING = 6


def reason_not_supported(x: jax.Array, states: jax.Array, weight: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if x.shape[1] % _CHANNELS:
        return f"GPU kernels take channels in multiples of {_CHANNELS}, got {x.shape[1]}"
    if weight.shape[1] > _MOST_TAPS:
        return f"GPU kernels take up to {_MOST_TAPS} taps, got {weight.shape[1]}"
    return mosaic_gpu.reason_of_floats(x, states) or mosaic_gpu.reason_without_hopper()


@functools.partial(jax.jit, static_argnames=("activation", "piece"))
def causal_conv1d(
    arguments: Convolution,
    states: jax.Array,  # [pages, C, W - 1]
    arrays: StepArrays,
    *,
    activation: str | None,
    piece: int = _PIECE,  # most tokens of a piece, at least W - 1
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, weight, bias = arguments
    num_channels, num_taps = weight.shape
    step = StateStep.of(x.shape[0], states.shape[0], arrays)
    table = pieces(step, x.shape[0], states.shape[0], piece)
    taps = weight.T.astype(jnp.float32)
    offset = jnp.zeros(num_channels, jnp.float32) if bias is None else bias.astype(jnp.float32)
    names = ("table", "x", "taps", "offset", "states", "out")

    def body(*refs: Any) -> None:
        _walk(SimpleNamespace(**dict(zip(names, refs, strict=True))), activation)

    run = mosaic_gpu.kernel_in_place(
        body,
        name=f"conv1d_w{num_taps}",
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid={"piece": table.shape[0], "tile": num_channels // _CHANNELS},
    )
    (out,), states = run(table, x, taps, offset, states)
    return out, states


def pieces(step: StateStep, num_tokens: int, num_pages: int, piece: int) -> jax.Array:
    """int32[room, fields] pieces of all sequences, and of the padding after them."""
    num_seqs = step.q_lens.shape[0]
    num_real = jnp.sum(step.q_lens)
    q_lens = jnp.append(step.q_lens, num_tokens - num_real)
    counts = -(-q_lens // piece)
    ends = jnp.cumsum(counts)
    n = jnp.arange(-(-num_tokens // piece) + num_seqs + 1)
    seq = jnp.minimum(jnp.sum(ends[None] <= n[:, None], axis=1), num_seqs)
    place = (n - ends[seq] + counts[seq]) * piece
    left = jnp.where(n < ends[-1], q_lens[seq] - place, 0)
    fields = {
        Field.TOKEN: jnp.append(step.starts, num_real)[seq] + place,
        Field.COUNT: jnp.minimum(left, piece),
        Field.PLACE: place,
        Field.LEFT: left,
        Field.READ: jnp.where(place == 0, jnp.append(step.read, 0)[seq], 0),
        Field.WRITE: jnp.where(place == 0, jnp.append(step.write % num_pages, 0)[seq], 0),
        Field.IS_PADDING: seq == num_seqs,
    }
    return jnp.stack([fields[field] for field in Field], axis=1).astype(jnp.int32)


def _walk(refs: Any, activation: str | None) -> None:
    """One tile of channels of one piece."""
    piece = lax.axis_index("piece")
    token, count, place, left, read, write, is_padding = (refs.table[piece, field] for field in Field)
    channels = pl.ds(pl.multiple_of(lax.axis_index("tile") * _CHANNELS, _CHANNELS), _CHANNELS)
    before = refs.taps.shape[0] - 1

    def load(ref: Any) -> jax.Array:
        return mosaic_gpu.load(ref, mosaic_gpu.ONE_PER_THREAD).astype(jnp.float32)

    def inputs(end: jax.Array) -> tuple[jax.Array, ...]:
        """The last inputs among the tokens before `end`."""
        return tuple(load(refs.x.at[lax.max(end - n, jnp.int32(0)), channels]) for n in range(before, 0, -1))

    def of_page() -> tuple[jax.Array, ...]:
        return tuple(load(refs.states.at[read, channels, n]) for n in range(before))

    @pl.when(count > 0)
    def _() -> None:
        taps = [load(refs.taps.at[n, channels]) for n in range(before + 1)]
        offset = load(refs.offset.at[channels])

        def some(num_tokens: int, start: jax.Array, i: jax.Array, window: tuple[jax.Array, ...]) -> Any:
            at = start + i * num_tokens
            new = [load(refs.x.at[at + n, channels]) for n in range(num_tokens)]
            for n, one in enumerate(new):
                window = (*window, one)
                y = _activated(_weighted(taps, window, offset), activation)
                y = jnp.where(lax.broadcast(is_padding == 1, y.shape), jnp.zeros_like(y), y)
                mosaic_gpu.store_plain(refs.out.at[at + n, channels], y.astype(refs.out.dtype))
                window = window[1:]
            return window

        window = lax.cond(place == 0, of_page, lambda: inputs(token))
        trips = lax.div(count, jnp.int32(_TOKENS))
        window = lax.fori_loop(0, trips, functools.partial(some, _TOKENS, token), window)
        rest = token + trips * _TOKENS
        window = lax.fori_loop(0, token + count - rest, functools.partial(some, 1, rest), window)

        @pl.when(write > 0)
        def _() -> None:
            last = lax.cond(left == count, lambda: window, lambda: inputs(token + left))
            for n, one in enumerate(last):
                mosaic_gpu.store_plain(refs.states.at[write, channels, n], one.astype(refs.states.dtype))


def _weighted(taps: Sequence[jax.Array], window: Sequence[jax.Array], offset: jax.Array) -> jax.Array:
    """float32[channels] before the activation."""
    y = offset
    for tap, one in zip(taps, window, strict=True):
        y = y + tap * one
    return y


def _activated(y: jax.Array, activation: str | None) -> jax.Array:
    return y / (1.0 + jnp.exp(-y)) if activation == "silu" else y

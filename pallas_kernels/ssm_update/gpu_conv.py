"""causal_conv1d on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU: a window of inputs in registers, channels in threads.

Flow:    api -> [causal_conv1d] -> pieces of sequences -> one launch -> (out, states in place)

Grid: pieces x tiles of 128 channels; a thread block is one warpgroup, a thread has one channel. A *piece* is up to 64
new tokens of one sequence. It begins with the W - 1 inputs before it: the sequence's first piece takes them from the
page, others from the tokens before. The first piece also leaves the states, so that thread blocks need not wait for
each other: who writes a page is the only one that reads it. Padding is a sequence of its own, without states, whose
outputs are 0.

Bytes: x and out once, and a page's channels read and written once for each sequence; memory binds. A page is
[C, W - 1], so that a tap of neighbouring channels is strided: its sectors are read W - 1 times, the first time from
memory. Inputs of several tokens are loaded together, since the window alone would wait for each.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.call import call
from pallas_kernels.gpu.places import PagePlaces, slabs_of, with_memory
from pallas_kernels.ssm_update.arguments import Convolution
from pallas_kernels.state_step import StateStep, StepArrays

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
    IS_PADDING = 5
    # Page for the state after the whole sequence, where it begins that; 0: none. Then those of tokens before, then of
    # checkpoints their pages, and as many tokens of the sequence up to them.
    WRITE = 6


def reason_not_supported(x: jax.Array, states: jax.Array, weight: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if x.shape[1] % _CHANNELS:
        return f"GPU kernels take channels in multiples of {_CHANNELS}, got {x.shape[1]}"
    if weight.shape[1] > _MOST_TAPS:
        return f"GPU kernels take up to {_MOST_TAPS} taps, got {weight.shape[1]}"
    return mosaic.reason_of_floats(x, states) or mosaic.reason_without_hopper()


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
    step = StateStep.of(x.shape[0], arrays)
    table = pieces(step, x.shape[0], piece)
    taps = weight.T.astype(jnp.float32)
    offset = jnp.zeros(num_channels, jnp.float32) if bias is None else bias.astype(jnp.float32)
    results = call(
        functools.partial(
            _walk, places=PagePlaces.of_numbers(states), activation=activation, num_kept=step.write.shape[1]
        ),
        _Refs,
        name=f"conv1d_w{num_taps}",
        grid={"piece": table.shape[0], "tile": num_channels // _CHANNELS},
        inputs={"table": table, "x": x, "taps": taps, "offset": offset},
        in_place={"states": slabs_of(states)},
        outputs={"out": jax.ShapeDtypeStruct(x.shape, x.dtype)},
    )
    return results["out"], with_memory(states, results["states"])


class _Refs(NamedTuple):
    """References in global memory."""

    table: Any  # int32[room, fields + L - 1 + 2 * k] of `pieces`
    x: Any  # [T, C]
    taps: Any  # float32[W, C]
    offset: Any  # float32[C]
    states: Any  # [slabs, numbers], of a page [C, W - 1]
    out: Any  # [T, C]


def pieces(step: StateStep, num_tokens: int, piece: int) -> jax.Array:
    """int32[room, fields + L - 1 + 2 * k] pieces of all sequences, and of the padding after them."""
    num_seqs, num_kept = step.write.shape
    num_real = jnp.sum(step.q_lens)
    q_lens = jnp.append(step.q_lens, num_tokens - num_real)
    counts = -(-q_lens // piece)
    ends = jnp.cumsum(counts)
    n = jnp.arange(-(-num_tokens // piece) + num_seqs + 1)
    seq = jnp.minimum(jnp.sum(ends[None] <= n[:, None], axis=1), num_seqs)
    place = (n - ends[seq] + counts[seq]) * piece
    left = jnp.where(n < ends[-1], q_lens[seq] - place, 0)
    fields: dict[int, jax.Array] = {
        Field.TOKEN: jnp.append(step.starts, num_real)[seq] + place,
        Field.COUNT: jnp.minimum(left, piece),
        Field.PLACE: place,
        Field.LEFT: left,
        Field.READ: jnp.where(place == 0, jnp.append(step.read, 0)[seq], 0),
        Field.IS_PADDING: seq == num_seqs,
    }
    pages = jnp.pad(step.write, [(0, 1), (0, 0)])[seq, ::-1]
    fields |= {Field.WRITE + n: jnp.where(place == 0, pages[:, n], 0) for n in range(num_kept)}
    if step.checkpoints is not None:
        own = jnp.concatenate([step.checkpoints.pages, step.checkpoints.ends], axis=1)
        own = jnp.where((place == 0)[:, None], jnp.pad(own, [(0, 1), (0, 0)])[seq], 0)
        fields |= {Field.WRITE + num_kept + n: own[:, n] for n in range(own.shape[1])}
    return jnp.stack([fields[field] for field in sorted(fields)], axis=1).astype(jnp.int32)


def _walk(refs: _Refs, places: PagePlaces, activation: str | None, num_kept: int) -> None:
    """One tile of channels of one piece."""
    piece = lax.axis_index("piece")
    token, count, place, left, read, is_padding, write = (refs.table[piece, field] for field in Field)
    channels = pl.ds(pl.multiple_of(lax.axis_index("tile") * _CHANNELS, _CHANNELS), _CHANNELS)
    before = refs.taps.shape[0] - 1

    def load(ref: Any) -> jax.Array:
        return mosaic.load(ref, mosaic.ONE_PER_THREAD).astype(jnp.float32)

    def inputs(end: jax.Array) -> tuple[jax.Array, ...]:
        """The last inputs among the tokens before `end`."""
        return tuple(load(refs.x.at[lax.max(end - n, jnp.int32(0)), channels]) for n in range(before, 0, -1))

    def of_page() -> tuple[jax.Array, ...]:
        return tuple(one.astype(jnp.float32) for one in mosaic.load_columns(in_page(read), before))

    def in_page(page: jax.Array) -> Any:
        """The channels of a page's state, a reference [channels * (W - 1)]."""
        slab, number = places.slab_and_entry(page)
        return refs.states.at[slab, pl.ds(number + channels.start * before, _CHANNELS * before)]

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
                mosaic.store_plain(refs.out.at[at + n, channels], y.astype(refs.out.dtype))
                window = window[1:]
            return window

        initial = window = lax.cond(place == 0, of_page, lambda: inputs(token))
        trips = lax.div(count, jnp.int32(_TOKENS))
        window = lax.fori_loop(0, trips, functools.partial(some, _TOKENS, token), window)
        rest = token + trips * _TOKENS
        window = lax.fori_loop(0, token + count - rest, functools.partial(some, 1, rest), window)

        def store(page: jax.Array, state: tuple[jax.Array, ...]) -> None:
            mosaic.store_columns(in_page(page), [one.astype(refs.states.dtype) for one in state])

        @pl.when(write > 0)
        def _() -> None:
            store(write, lax.cond(left == count, lambda: window, lambda: inputs(token + left)))

        others = [refs.table[piece, n] for n in range(Field.WRITE + 1, refs.table.shape[1])]
        num_pages = num_kept - 1 + (len(others) - (num_kept - 1)) // 2
        ends = [*(left - n for n in range(1, num_kept)), *others[num_pages:]]
        for page, end in zip(others[:num_pages], ends, strict=True):

            @pl.when(page > 0)
            def _(page: jax.Array = page, end: jax.Array = end) -> None:
                store(page, _shifted_in(initial, inputs(token + end), end))


def _shifted_in(old: tuple[jax.Array, ...], new: tuple[jax.Array, ...], count: jax.Array) -> tuple[jax.Array, ...]:
    """The last inputs after `count` new ones, of which `new` are the last; `old` are those before."""
    found = list(new)
    for n in range(len(new)):
        for m in range(n + 1, len(old)):  # with m - n new ones, the n-th of the last is the m-th old one
            is_old = lax.broadcast(count == m - n, old[m].shape)
            found[n] = jnp.where(is_old, old[m], found[n])
    return tuple(found)


def _weighted(taps: Sequence[jax.Array], window: Sequence[jax.Array], offset: jax.Array) -> jax.Array:
    """float32[channels] before the activation."""
    y = offset
    for tap, one in zip(taps, window, strict=True):
        y = y + tap * one
    return y


def _activated(y: jax.Array, activation: str | None) -> jax.Array:
    return y / (1.0 + jnp.exp(-y)) if activation == "silu" else y

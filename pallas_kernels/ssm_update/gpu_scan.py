"""selective_scan on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU: a state in registers over all tokens of its sequence.

Flow:    api -> [selective_scan] -> one launch for decode and longer sequences -> (out, states in place)
Source:  the recurrence of Mamba (arXiv 2312.00752, section 3.3): the state stays on chip, only inputs and outputs move

Grid: sequences x heads x tiles of a head's rows; a thread block is one warpgroup. It reads its tile of the state from
the sequence's page, walks over the new tokens, and writes the tile back after each token whose state is kept. These are
plain loads and stores of whole sectors; many blocks to a multiprocessor hide them, so that nothing is waited for by
hand. Mamba 1 is one head of H rows, each row and number with its own decay.

Decode reads each state once and writes it once, which is all but a hundredth of its bytes; memory binds. A longer
sequence takes its tokens one after the other, three instructions for every 32 numbers of the state and token on plain
cores; the tensor core is not used. Inputs of a few tokens are loaded while the few before are computed, since one
sequence alone would wait for each; where a step has no more tokens than sequences that is left out, and the registers
that it takes go to more thread blocks.

XLA makes the time steps and adds `d * x`: elementwise work on what it reads or writes anyway.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.call import call
from pallas_kernels.gpu.places import PagePlaces, PageView, reason_of_places, with_memory
from pallas_kernels.gpu.recurrence import over_tokens
from pallas_kernels.ssm_update.arguments import Scan
from pallas_kernels.ssm_update.reference import add_skip, time_steps
from pallas_kernels.state_step import Checkpoints, StateStep, StepArrays

_STATE_DIM_STEP, _MOST_STATE_DIM = 8, 256
_TILE_NUMBERS = {True: 2048, False: 4096}  # of a state, by whether it is Mamba 1, which keeps as many decays
_INPUT_BYTES = 1024  # of b, of the tokens whose inputs are loaded together
_MOST_TOKENS = 4


def reason_not_supported(x: jax.Array, states: jax.Array) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    rows, state_dim = states.shape[-2:]
    if state_dim % _STATE_DIM_STEP or state_dim > _MOST_STATE_DIM:
        return (
            f"GPU kernels take states in multiples of {_STATE_DIM_STEP} up to {_MOST_STATE_DIM} numbers, got "
            f"{state_dim}"
        )
    step = mosaic.lane_rows_step(state_dim)
    if rows % step:
        what = "channels" if x.ndim == 2 else "heads"
        return f"GPU kernels take {what} in multiples of {step} for states of {state_dim} numbers, got {rows}"
    return mosaic.reason_of_floats(x, states) or reason_of_places(states, 1, 1) or mosaic.reason_without_hopper()


@functools.partial(jax.jit, static_argnames="dt_limit")
def selective_scan(
    arguments: Scan, states: jax.Array, arrays: StepArrays, *, dt_limit: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    """(out, states) as `SsmOutput`."""
    x, dt, a, b, c, d, dt_bias = arguments
    step = StateStep.of(x.shape[0], arrays)
    dt, a = time_steps(dt, dt_bias, dt_limit), a.astype(jnp.float32)
    inputs = (x, dt, a, b, c)
    if x.ndim == 2:  # as one head
        inputs = (x[:, None], dt[:, None], a[None], b[:, None], c[:, None])
    out, after = _scan(step, *inputs, PageView.of(states, 1))
    return add_skip(out.reshape(x.shape), x, d, step), with_memory(states, after)


def _scan(
    step: StateStep,
    x: jax.Array,  # [T, H, P]
    dt: jax.Array,  # float32[T, H] time steps; Mamba 1: [T, 1, P]
    a: jax.Array,  # float32[H]; Mamba 1: [1, P, N]
    b: jax.Array,  # [T, G, N]
    c: jax.Array,
    states: PageView,  # entries [N], of a page H * P
) -> tuple[jax.Array, jax.Array]:
    """(c . state float32[T, H, P], undefined for padding; entries)."""
    (_, num_heads, num_rows), state_dim = x.shape, b.shape[2]
    most_tokens = _MOST_TOKENS if x.shape[0] > step.q_lens.shape[0] else 1
    tile = _Tile.of(num_rows, num_heads // b.shape[1], state_dim, dt.ndim == 3, b.dtype.itemsize, most_tokens)
    results = call(
        functools.partial(_walk, tile=tile, places=states.places),
        _Refs,
        name=f"scan{1 if tile.is_mamba1 else 2}_r{tile.rows}_t{tile.num_tokens}",
        grid={"seq": step.q_lens.shape[0], "head": num_heads, "tile": num_rows // tile.rows},
        inputs={
            "starts": step.starts,
            "q_lens": step.q_lens,
            "read": step.read,
            "write": step.write,
            "checkpoints": step.checkpoints,
            "x": x,
            "dt": dt,
            "a": a,
            "b": b,
            "c": c,
        },
        in_place={"states": states.entries},
        outputs={"out": jax.ShapeDtypeStruct(x.shape, jnp.float32)},
    )
    return results["out"], results["states"]


class _Refs(NamedTuple):
    """References in global memory."""

    starts: Any  # int32[S] first new token of each sequence
    q_lens: Any  # int32[S]
    read: Any  # int32[S] pages
    write: Any  # int32[S, states kept of each] pages, 0: none
    checkpoints: Checkpoints | None
    x: Any  # [T, H, P]
    dt: Any  # float32[T, H]; Mamba 1: [T, 1, P]
    a: Any  # float32[H]; Mamba 1: [1, P, N]
    b: Any  # [T, G, N]
    c: Any  # [T, G, N]
    states: Any  # [rows, N], P rows of each of a page's H heads
    out: Any  # float32[T, H, P]


class _Tile(NamedTuple):
    """What one thread block has of a state."""

    rows: int
    state_dim: int
    heads_per_group: int
    is_mamba1: bool
    num_tokens: int  # whose inputs are loaded together, ahead

    @classmethod
    def of(
        cls, num_rows: int, heads_per_group: int, state_dim: int, is_mamba1: bool, itemsize: int, most_tokens: int
    ) -> _Tile:
        """The largest tile of whole layout steps that divides a head's rows and leaves registers for the inputs."""
        step = mosaic.lane_rows_step(state_dim)
        most = max(step, _TILE_NUMBERS[is_mamba1] // state_dim)
        rows = max(n for n in range(step, most + 1, step) if num_rows % n == 0)
        num_tokens = max(1, min(most_tokens, _INPUT_BYTES // (state_dim * itemsize)))
        return cls(rows, state_dim, heads_per_group, is_mamba1, num_tokens)

    @property
    def layout(self) -> Any:
        """The layout of the tile in registers."""
        return mosaic.lane_rows(self.state_dim)

    def across(self, per_row: jax.Array) -> jax.Array:
        """A value per row as a matrix."""
        return lax.broadcast_in_dim(per_row, (self.rows, self.state_dim), [0])

    def down(self, per_column: jax.Array) -> jax.Array:
        """A value per column as a matrix."""
        return lax.broadcast_in_dim(per_column, (self.rows, self.state_dim), [1])


class _Token(NamedTuple):
    """Inputs of one token as they come from memory."""

    x: jax.Array  # [rows]
    dt: jax.Array  # float32[], Mamba 1: [rows]
    b: jax.Array  # [N]
    c: jax.Array


class _Share(NamedTuple):
    """Which part of a step's tokens and states one thread block has."""

    refs: _Refs
    tile: _Tile
    places: PagePlaces  # in rows of states
    head: jax.Array
    rows: Any  # of the head
    a: jax.Array  # of the head; Mamba 1: of the tile
    seq: jax.Array
    first: jax.Array  # token
    end: jax.Array

    @property
    def write(self) -> Any:
        """Pages of the states that are kept."""
        return self.refs.write

    @property
    def checkpoints(self) -> Any:
        """Where states are left on the way, or None."""
        return self.refs.checkpoints

    @property
    def num_together(self) -> int:
        """Tokens whose inputs are loaded together, ahead."""
        return self.tile.num_tokens

    def load(self, token: jax.Array) -> _Token:
        """Inputs of a token, or of the last one where it is beyond that."""
        refs, layout = self.refs, self.tile.layout
        token = lax.min(token, self.end - 1)
        group = lax.div(self.head, jnp.int32(self.tile.heads_per_group))
        own = (token, self.head, self.rows)
        return _Token(
            x=mosaic.load(refs.x.at[own], layout.reduce(1)),
            dt=mosaic.load(refs.dt.at[own], layout.reduce(1)) if self.tile.is_mamba1 else refs.dt[token, self.head],
            b=mosaic.load(refs.b.at[token, group], layout.reduce(0)),
            c=mosaic.load(refs.c.at[token, group], layout.reduce(0)),
        )

    def advance(self, token: jax.Array, state: jax.Array, inputs: _Token) -> jax.Array:
        """The state after a token, whose output it stores."""
        state, seen = _advance(self.tile, state, self.a, inputs)
        mosaic.store_plain(self.refs.out.at[token, self.head, self.rows], seen)
        return state

    def store_state(self, page: jax.Array, state: jax.Array) -> None:
        """Stores a state in a page."""
        target = _in_page(self.refs, self.places, page, self.head, self.rows)
        mosaic.store_plain(target, state.astype(self.refs.states.dtype))


def _in_page(refs: _Refs, places: PagePlaces, page: jax.Array, head: jax.Array, rows: Any) -> Any:
    """Rows of a head of a page's state, a reference."""
    num_rows = refs.x.shape[2]
    return refs.states.at[pl.ds(places.entry(page) + head * num_rows + rows.start, rows.size)]


def _walk(refs: _Refs, tile: _Tile, places: PagePlaces) -> None:
    """One tile of one head of one sequence: its state over all new tokens. The last sequences, the long ones, first."""
    seq = refs.q_lens.shape[0] - 1 - lax.axis_index("seq")
    head = lax.axis_index("head")
    rows = pl.ds(pl.multiple_of(lax.axis_index("tile") * tile.rows, tile.rows), tile.rows)
    first, count = refs.starts[seq], refs.q_lens[seq]

    @pl.when(count > 0)
    def _() -> None:
        page = _in_page(refs, places, refs.read[seq], head, rows)
        state = mosaic.load(page, tile.layout).astype(jnp.float32)
        a = mosaic.load(refs.a.at[head, rows], tile.layout) if tile.is_mamba1 else refs.a[head]
        over_tokens(_Share(refs, tile, places, head, rows, a, seq, first, first + count), state)


def _advance(tile: _Tile, state: jax.Array, a: jax.Array, token: _Token) -> tuple[jax.Array, jax.Array]:
    """(state float32[rows, N] after a token, c . state float32[rows])."""
    inflow = token.x.astype(jnp.float32) * token.dt
    decay = jnp.exp((tile.across(token.dt) if tile.is_mamba1 else token.dt) * a)
    state = state * decay + tile.across(inflow) * tile.down(token.b.astype(jnp.float32))
    return state, jnp.sum(state * tile.down(token.c.astype(jnp.float32)), axis=1)

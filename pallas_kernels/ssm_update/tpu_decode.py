"""selective_scan for TPU, decode tokens: eight sequences a step, one token each, a tile of their heads or channels.

Flow:    tokens of the step's decode sequences, pages of their states -> [decode] -> (outputs, states in place)

Grid: tiles of 8 tokens x tiles of a state. A step loads a tile of each sequence's state from its page, one DMA each,
while the one before is computed, and stores the new ones while the next is. Bytes: each state read and written, beside
which the tokens are little; HBM binds.

Mamba 2 keeps a head as [P, N]. What a token adds, x[p] * b[n], is a matrix product of 16 rows, x in parts that make it
exact; outputs are one of c and the new states. Mamba 1 keeps channels in lanes, [N, H], and sums over sublanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic import LANES, SUBLANES, Copy, Ref, compiler_params

TOKENS = SUBLANES  # of a step
_BUFFER_BYTES = 5 << 18  # of one buffer, of four
_MOST_HEADS = 5  # of a tile: three parts of each fit the rows of one matrix product
_ROWS = 16


@dataclass(frozen=True)
class StateTiles:
    """Moves tiles of the states of eight sequences; step k of the grid is (k // num_tiles, k % num_tiles)."""

    read: Ref  # int32[tokens + tokens / 8] pages in SMEM, 0: from zero; then how many pages each eight tokens have
    write: Ref  # as that; 0: nowhere
    states: Ref  # in HBM
    coming: Ref  # [2, 8, *tile]
    going: Ref
    arrived: Ref  # semaphores of the two buffers
    left: Ref
    num_rows: int  # tokens
    num_tiles: int
    axis: int  # of a page, which the tiles cut

    def load(self, step: jax.Array) -> None:
        """Starts the loads of a step, into the buffer of its parity; what starts from zero is zeroed there."""

        def some(b: jax.Array, page: jax.Array) -> None:
            @pl.when(page > 0)
            def _() -> None:
                self._loading(step, b, page).start()

            @pl.when(page == 0)
            def _() -> None:
                self.coming[step & 1, b] = jnp.zeros(self.coming.shape[2:], self.coming.dtype)

        self._each(step, self.read, some)

    def wait_for_load(self, step: jax.Array) -> None:
        """Waits for the loads of a step."""
        self._wait(self.read, step, self.coming, self.arrived)

    def store(self, step: jax.Array) -> None:
        """Starts the stores of a step."""
        self._each(step, self.write, lambda b, page: pl.when(page > 0)(lambda: self._storing(step, b, page).start()))

    def wait_for_store(self, step: jax.Array) -> None:
        """Waits for them."""
        self._wait(self.write, step, self.going, self.left)

    def _wait(self, pages: Ref, step: jax.Array, buffer: Ref, moved: Ref) -> None:
        """Waits for all bytes of a step's copies at once."""
        slot = step & 1
        count = pages[self.num_rows + lax.div(step, self.num_tiles)]
        some = buffer.at[slot, pl.ds(0, count)]
        pl.when(count > 0)(lambda: pltpu.make_async_copy(some, some, moved.at[slot]).wait())

    def _each(self, step: jax.Array, pages: Ref, some: Callable[[jax.Array, jax.Array], Any]) -> None:
        first = lax.div(step, self.num_tiles) * TOKENS

        def one(b: jax.Array, carry: None) -> None:
            some(b, pages[first + b])
            return carry

        lax.fori_loop(0, TOKENS, one, None)

    def _loading(self, step: jax.Array, b: jax.Array, page: jax.Array) -> Copy:
        slot = step & 1
        return pltpu.make_async_copy(self._tile(step, page), self.coming.at[slot, b], self.arrived.at[slot])

    def _storing(self, step: jax.Array, b: jax.Array, page: jax.Array) -> Copy:
        slot = step & 1
        return pltpu.make_async_copy(self.going.at[slot, b], self._tile(step, page), self.left.at[slot])

    def _tile(self, step: jax.Array, page: jax.Array) -> Ref:
        size = self.coming.shape[2 + self.axis]
        first = lax.rem(step, self.num_tiles) * size
        where: list[Any] = [slice(None)] * (len(self.coming.shape) - 2)
        where[self.axis] = pl.ds(pl.multiple_of(first, size), size)
        return self.states.at[(page, *where)]


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
        [rows, decay, b.astype(jnp.float32), c.astype(jnp.float32)],
        [
            pl.BlockSpec((TOKENS, 1, *rows.shape[2:]), lambda i, j, *_: (i, j, 0, 0)),
            pl.BlockSpec((TOKENS, num_heads), lambda i, j, *_: (i, 0), memory_space=pltpu.SMEM),
            all_groups,
            all_groups,
        ],
        jax.ShapeDtypeStruct((num_heads // heads, num_tokens, heads * head_dim), jnp.float32),
        pl.BlockSpec((1, TOKENS, heads * head_dim), lambda i, j, *_: (j, i, 0)),
        states,
        (heads, head_dim, state_dim),
        0,
        (read, write, num_decode),
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


def _mamba2(
    x: Ref,  # [8, 1, rows, P] parts of the inputs, heads inner
    decay: Ref,  # float32[8, H] in SMEM
    b: Ref,  # float32[8, G, N]
    c: Ref,
    out: Ref,  # float32[1, 8, heads * P]
    before: Ref,  # [8, heads, P, N]
    after: Ref,
    *,
    heads_per_group: int,
    num_parts: int,
    dtype: jnp.dtype,
) -> None:
    """One tile of heads of eight tokens; `dtype`: of the matrix products' operands."""
    num_heads, state_dim = before.shape[1], before.shape[3]
    first = pl.program_id(1) * num_heads
    group = pl.ds(lax.div(first, heads_per_group), 1)
    row = lax.broadcasted_iota(jnp.int32, (x.shape[2], state_dim), 0)
    token = lax.broadcasted_iota(jnp.int32, out.shape[1:], 0)
    seen = jnp.zeros(out.shape[1:], jnp.float32)
    factors = jnp.concatenate([c[t, group, :] for t in range(TOKENS)]).astype(dtype)
    for t in range(TOKENS):
        inputs, shares, states = x[t, 0], b[t, group, :], []
        for k in range(num_heads):
            own = (row == k) | ((row >= num_heads) & (row < num_parts * num_heads) & (row % num_heads == k))
            inflow = _product(inputs, jnp.where(own, shares, 0.0).astype(dtype), 0)
            state = before[t, k].astype(jnp.float32) * decay[t, first + k] + inflow
            after[t, k] = state.astype(after.dtype)
            states.append(state.astype(dtype))
        seen = jnp.where(token == t, _product(factors, jnp.concatenate(states), 1), seen)
    out[0] = seen


@jax.jit
def mamba1(
    states: jax.Array,  # [pages, N, H]
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
    _, state_dim, num_channels = states.shape
    tiles = largest_divisor(num_channels // LANES, _BUFFER_BYTES // (TOKENS * 4 * state_dim * LANES))
    width = tiles * LANES
    of_channels = pl.BlockSpec((TOKENS, width), lambda i, j, *_: (i, j))
    of_states = pl.BlockSpec((TOKENS, state_dim), lambda i, j, *_: (i, 0))
    return launch(
        _mamba1,
        [x, dt, a, b.astype(jnp.float32), c.astype(jnp.float32)],
        [of_channels, of_channels, pl.BlockSpec((state_dim, width), lambda i, j, *_: (0, j)), of_states, of_states],
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        of_channels,
        states,
        (state_dim, width),
        1,
        (read, write, num_decode),
        name=f"scan_decode_c{width}",
    )


def _mamba1(
    x: Ref,  # float32[8, width]
    dt: Ref,  # float32[8, width]
    a: Ref,  # float32[N, width]
    b: Ref,  # float32[8, N]
    c: Ref,
    out: Ref,  # float32[8, width]
    before: Ref,  # [8, N, width]
    after: Ref,
) -> None:
    """One tile of channels of eight tokens."""
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
            state = before[t, :, lanes].astype(jnp.float32) * decay + x[own, lanes] * inflow
            after[t, :, lanes] = state.astype(after.dtype)
            out[own, lanes] = jnp.sum(state * seen, axis=0, keepdims=True)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Matrix product in float32 that sums over this axis of both."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((axis,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def largest_divisor(n: int, most: int) -> int:
    """Of `n`, at most `most` and at least 1."""
    return max(k for k in range(1, max(1, min(n, most)) + 1) if n % k == 0)


def _with_counts(pages: jax.Array) -> jax.Array:
    """`pages` of a multiple of eight tokens, and after them how many of each eight are not 0."""
    return jnp.concatenate([pages, jnp.sum(pages.reshape(-1, TOKENS) > 0, axis=1, dtype=jnp.int32)])


def launch(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    in_specs: Sequence[pl.BlockSpec],
    out_shape: jax.ShapeDtypeStruct,
    out_spec: pl.BlockSpec,
    states: jax.Array,
    tile: tuple[int, ...],
    axis: int,
    pages: tuple[jax.Array, jax.Array, jax.Array],  # read, write, number of tokens
    *,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Runs `body(*inputs, out, states before, states after)` for every step."""
    read_pages, write_pages, num_decode = pages
    num_tiles = states.shape[1 + axis] // tile[axis]

    def kernel(read: Ref, write: Ref, *refs: Ref) -> None:
        *blocks, _states, out, written, coming, going, arrived, left = refs
        tiles = StateTiles(read, write, written, coming, going, arrived, left, read_pages.shape[0], num_tiles, axis)
        step, num_steps = pl.program_id(0) * num_tiles + pl.program_id(1), pl.num_programs(0) * num_tiles
        pl.when(step == 0)(lambda: tiles.load(step))
        pl.when(step + 1 < num_steps)(lambda: tiles.load(step + 1))
        tiles.wait_for_load(step)
        pl.when(step > 1)(lambda: tiles.wait_for_store(step - 2))
        body(*blocks, out, coming.at[step & 1], going.at[step & 1])
        tiles.store(step)

        @pl.when(step + 1 == num_steps)
        def _() -> None:
            pl.when(step > 0)(lambda: tiles.wait_for_store(step - 1))
            tiles.wait_for_store(step)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, TOKENS, *tile), states.dtype)
    out, written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(num_decode, TOKENS), num_tiles),
            in_specs=[*in_specs, in_hbm],
            out_specs=[out_spec, in_hbm],
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[out_shape, jax.ShapeDtypeStruct(states.shape, states.dtype)],
        input_output_aliases={2 + len(inputs): 1},
        compiler_params=compiler_params(32 << 20, grid_rank=2),
        name=name,
    )(_with_counts(read_pages), _with_counts(write_pages), *inputs, states)
    return out, written

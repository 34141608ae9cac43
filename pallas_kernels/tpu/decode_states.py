"""Recurrent states of decoding sequences on TPU: eight sequences a step, one token each, tiles of their states.

Flow:    pages of states, what a step computes -> [launch] -> (outputs, states in place)

Grid: tiles of 8 tokens x tiles of a state. A step loads a tile of each sequence's state from its page, one DMA each,
while the one before is computed, and stores the new ones while the next is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.mosaic import SUBLANES, Copy, Ref
from pallas_kernels.tpu.slab_refs import seen_shape

TOKENS = SUBLANES  # of a step


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


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n`, at most `most` and at least 1."""
    return max(k for k in range(1, max(1, min(n, most)) + 1) if n % k == 0)


def _with_counts(pages: jax.Array) -> jax.Array:
    """`pages` of a multiple of eight tokens, and after them how many of each eight are not 0."""
    return jnp.concatenate([pages, jnp.sum(pages.reshape(-1, TOKENS) > 0, axis=1, dtype=jnp.int32)])


Blocks = TypeVar("Blocks", bound=NamedTuple)  # of `Operand`s in a call, of references in a kernel


class _Refs(NamedTuple):
    """References of a launch; buffers as `StateTiles` has them."""

    read: Ref  # SMEM, as `StateTiles` has it
    write: Ref
    inputs: Any  # `Blocks` of the kernel
    out: Ref
    states: Ref  # HBM [pages, ...]
    coming: Ref
    going: Ref
    arrived: Ref
    left: Ref


class Pages(NamedTuple):
    """Pages of the tokens, a multiple of eight of them."""

    read: jax.Array  # int32[tokens], 0: from zero
    write: jax.Array  # int32[tokens], 0: nowhere
    num_decode: jax.Array  # int32[] tokens of sequences that decode, the first ones


def launch(
    body: Callable[[Blocks, Ref, Ref, Ref], None],
    inputs: Blocks,
    out: Operand,
    states: jax.Array,
    tile: tuple[int, ...],  # of a page
    axis: int,  # of a page, which tiles cut
    pages: Pages,
    *,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """(out, states) after `body(inputs, out, tiles of states before, after [8, *tile])` for every step."""
    num_tiles = seen_shape(states)[1 + axis] // tile[axis]

    def run(refs: _Refs) -> None:
        tiles = StateTiles(
            refs.read,
            refs.write,
            refs.states,
            refs.coming,
            refs.going,
            refs.arrived,
            refs.left,
            pages.read.shape[0],
            num_tiles,
            axis,
        )
        step, num_steps = pl.program_id(0) * num_tiles + pl.program_id(1), pl.num_programs(0) * num_tiles
        pl.when(step == 0)(lambda: tiles.load(step))
        pl.when(step + 1 < num_steps)(lambda: tiles.load(step + 1))
        tiles.wait_for_load(step)
        pl.when(step > 1)(lambda: tiles.wait_for_store(step - 2))
        body(refs.inputs, refs.out, refs.coming.at[step & 1], refs.going.at[step & 1])
        tiles.store(step)

        @pl.when(step + 1 == num_steps)
        def _() -> None:
            pl.when(step > 0)(lambda: tiles.wait_for_store(step - 1))
            tiles.wait_for_store(step)

    buffer = pltpu.VMEM((2, TOKENS, *tile), states.dtype)
    results = call(
        run,
        _Refs,
        name=name,
        grid=(pl.cdiv(pages.num_decode, TOKENS), num_tiles),
        scalars={"read": _with_counts(pages.read), "write": _with_counts(pages.write)},
        inputs={"inputs": inputs},
        outputs={"out": out},
        in_place={"states": states},
        scratch={
            "coming": buffer,
            "going": buffer,
            "arrived": pltpu.SemaphoreType.DMA((2,)),
            "left": pltpu.SemaphoreType.DMA((2,)),
        },
        vmem_limit_bytes=32 << 20,
    )
    return results["out"], results["states"]

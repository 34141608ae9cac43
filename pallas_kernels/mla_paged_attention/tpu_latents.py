"""Latent blocks of the TPU kernel: DMA of their pages into a ring of buffers, and reading them as keys or values.

Flow:    units of a step + block tables + pages in HBM -> [LatentBlocks.start / wait] -> VMEM -> [keys, values]

A page is one DMA, as it lies in HBM: rows of words that hold `packing` states each. Read a row of words a sublane, that
is how registers hold states one below the other, so keys and values cost no unpacking.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla_paged_attention.tpu_plan import LatentConfig, Step, Unit
from pallas_kernels.tpu.items import ItemTable
from pallas_kernels.tpu.mosaic import LANES, Ref, elements, load_row
from pallas_kernels.tpu.slab_refs import named_page

# int32 slots of a block -> bool: whether they are kept.
MaskOf = Callable[[jax.Array], jax.Array]


def buffer_shape(config: LatentConfig, pages: jax.Array) -> tuple[int, ...]:
    """Shape of the buffers for `pages` [pages, rows, pieces, packing, 128]."""
    return (config.buffers, config.units, config.block_pages * pages.shape[1], *pages.shape[2:])


@dataclass(frozen=True)
class LatentBlocks:
    """References of one launch."""

    config: LatentConfig
    items: ItemTable
    pages: Ref  # HBM [num_pages, rows, pieces, packing, 128]
    buffer: Ref  # VMEM, `buffer_shape`
    arrived: Ref  # DMA semaphores, one a buffer

    def start(self, step: Step, is_full: jax.Array, slot: jax.Array) -> None:
        """Starts the DMAs of all pages of a step: unrolled where its blocks are full.

        Else in a loop of one trip or none, which the compiler's listing keeps apart.
        """
        items, pages = self.items, self.config.block_pages

        @pl.when(is_full)
        def _() -> None:
            entries = [items.full_entries(unit.item) + unit.step * pages for unit in step.units]
            for i, entry in enumerate(entries):
                items.start_full(entry, functools.partial(self._start_page, slot=slot, i=i))

        def cut(_: jax.Array, carry: None) -> None:
            for i, unit in enumerate(step.units):
                page = functools.partial(self._start_page, slot=slot, i=i)
                items.start(unit.item, *self._block(unit), page)
            return carry

        lax.fori_loop(is_full.astype(jnp.int32), 1, cut, None)

    def wait(self, step: Step, slot: jax.Array) -> None:
        """Waits for them."""
        for i, unit in enumerate(step.units):
            num_pages = self._block(unit)[1]
            window = self.buffer.at[slot, i, pl.ds(0, num_pages * self.pages.shape[1])]
            pl.when(num_pages > 0)(pltpu.make_async_copy(window, window, self.arrived.at[slot]).wait)

    def wait_full(self, slot: jax.Array) -> None:
        """Waits for the pages of a step whose blocks are all whole."""
        window = self.buffer.at[slot]
        pltpu.make_async_copy(window, window, self.arrived.at[slot]).wait()

    def keys(self, slot: jax.Array, unit: int, part: int) -> jax.Array:
        """[part, lanes] in the compute dtype: the states of a part; padding lanes are 0."""
        return self._states(self._words(slot, unit, part, self.config.lanes))

    def values(self, slot: jax.Array, unit: int, part: int, mask_of: MaskOf | None) -> jax.Array:
        """[part, value_lanes] in the compute dtype: their first numbers, 0 where `mask_of` says so."""
        words = self._words(slot, unit, part, self.config.value_lanes)
        if mask_of is not None:
            words = words & jnp.concatenate([self._kept_bits(part, mask_of)] * (words.shape[1] // LANES), axis=1)
        return self._states(words)

    def _words(self, slot: jax.Array, unit: int, part: int, lanes: int) -> jax.Array:
        """uint32[part / packing, lanes]: a part's words."""
        count, head_dim = self.config.part // self.buffer.shape[4], self.config.head_dim
        pieces = [load_row(self.buffer, (slot, unit), part * count, count, piece) for piece in range(lanes // LANES)]
        if head_dim < lanes:
            is_real = lax.broadcasted_iota(jnp.int32, (count, LANES), 1) < head_dim % LANES
            pieces[-1] = jnp.where(is_real, pieces[-1], jnp.zeros_like(pieces[-1]))
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)

    def _states(self, words: jax.Array) -> jax.Array:
        return elements(words, self.buffer.dtype).astype(self.config.compute_dtype)

    def _kept_bits(self, part: int, mask_of: MaskOf) -> jax.Array:
        """uint32[part / packing, 128]: ones for the states that are kept."""
        packing = self.buffer.shape[4]
        bits = 32 // packing
        shape = (self.config.part // packing, LANES)
        first = part * self.config.part + packing * lax.broadcasted_iota(jnp.int32, shape, 0)
        kept = jnp.zeros(shape, jnp.uint32)
        for place in range(packing):
            ones = jnp.uint32((0xFFFFFFFF >> (32 - bits)) << (bits * place))
            kept = kept | jnp.where(mask_of(first + place), ones, jnp.uint32(0))
        return kept

    def _block(self, unit: Unit) -> tuple[jax.Array, jax.Array]:
        """(number of the unit's block, its pages, 0 beyond the end)."""
        block, num_pages = self.items.block(*unit)
        return block, jnp.maximum(num_pages, 0)

    def _start_page(self, entry: jax.Array, j: jax.Array | int, *, slot: jax.Array, i: int) -> None:
        rows = self.pages.shape[1]
        target = self.buffer.at[slot, i, pl.ds(j * rows, rows)]
        source = named_page(self.pages, self.items.entries[entry])
        pltpu.make_async_copy(source, target, self.arrived.at[slot]).start()

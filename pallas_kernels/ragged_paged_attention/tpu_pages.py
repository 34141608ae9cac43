"""KV blocks of the TPU kernel: DMA of their pages into a ring of buffers, and reading K or V of one head.

Flow:    item table + block tables + pages in HBM -> [KVBlocks.start / wait] -> VMEM -> [KVBlocks.load] -> [n, lanes]

A page is one DMA. The buffer has one spare row a token where a token has an even number of rows, so that the stride of
a head's load is odd: with a stride of 8 or 16 the compiler splits each load.

Where tokens share rows of words (`layouts.tokens_per_row`), a page fills as many rows fewer; words of two tokens, taken
for rows of 16-bit numbers, are theirs one below the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu_plan import TpuConfig
from pallas_kernels.tpu.block_mask import kept_slots
from pallas_kernels.tpu.items import ItemTable
from pallas_kernels.tpu.mosaic import LANES, Ref, elements, load_row, packing, recast
from pallas_kernels.tpu.slab_refs import named_page


def buffer_shape(config: TpuConfig, pages: jax.Array) -> tuple[int, ...]:
    """Shape of the buffers for `pages` [pages, page_size / tokens a row, rows, packing, 128]."""
    rows, pack, lanes = pages.shape[2:]
    return (config.buffers, config.block // config.tokens_per_row, rows | 1, pack, lanes)


@dataclass(frozen=True)
class KVBlocks:
    """References of one launch."""

    config: TpuConfig
    items: ItemTable
    pages: Ref  # HBM [num_pages, page_size / tokens a row, rows, packing, 128]
    buffer: Ref  # VMEM, `buffer_shape`
    arrived: Ref  # DMA semaphores, one a buffer

    def start(self, item: jax.Array, block: jax.Array, num_pages: jax.Array, slot: jax.Array, base: jax.Array) -> None:
        """Starts the DMAs of the pages of any block of an item, whose block table begins at entry `base`."""
        self.items.start(item, block, num_pages, functools.partial(self._start_page, slot=slot), base)

    def start_full(self, entry: jax.Array, slot: jax.Array) -> None:
        """Starts the DMAs of a whole block of the contiguous run, from its first table entry on."""
        self.items.start_full(entry, functools.partial(self._start_page, slot=slot))

    def wait(self, num_pages: jax.Array | int, slot: jax.Array) -> None:
        """Waits for the first pages of a block."""
        window = self._window(slot, 0, num_pages)
        pltpu.make_async_copy(window, window, self.arrived.at[slot]).wait()  # for as many bytes as it has

    def load(
        self,
        slot: jax.Array,
        head: tuple[
            jax.Array | int, int
        ],  # (base, offset): base, which may be traced, is a multiple of heads of a word
        value: int,  # 0: K, 1: V
        first: int,
        count: int,
        kept: jax.Array | None = None,  # bool[count, lanes]; elements of others are zero. Of shared rows: `kept_bits`
    ) -> jax.Array:
        """K or V of head `base + offset`, [count, lanes] in the dtype that matrix products take."""
        if self.config.tokens_per_row > 1:
            return self._load_shared(slot, value, first, count, kept)
        dtype, pushed_dtype, (base, offset) = self.buffer.dtype, self.config.pushed_dtype, head
        pack = packing(dtype)
        word, place = base * 2 // pack + (2 * offset + value) // pack, (2 * offset + value) % pack
        pieces = []
        for piece in range(self.config.num_pieces):
            of_piece = None if kept is None else kept[:, piece * LANES : (piece + 1) * LANES]
            words = load_row(self.buffer, (slot,), first, count, word * self.config.num_pieces + piece)
            masks_words = jnp.dtype(pushed_dtype).itemsize == 1
            if of_piece is not None and masks_words:
                words = jnp.where(of_piece, words, jnp.zeros_like(words))
            x = _element(words, place, dtype, pushed_dtype).astype(pushed_dtype)
            if of_piece is not None and not masks_words:
                x = jnp.where(of_piece, x, jnp.zeros_like(x))
            pieces.append(x)
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)

    def kept_bits(self, item: jax.Array, block: jax.Array, first: int, count: int) -> jax.Array:
        """uint32[count / 2, 128]: of rows that two tokens share, the bits of those that some row of the item sees."""
        even = first + 2 * lax.broadcasted_iota(jnp.int32, (count // 2, LANES), 0)
        halves = [
            jnp.where(kept_slots(self.items, item, block, even + token), jnp.uint32(0xFFFF << 16 * token), 0)
            for token in range(2)
        ]
        return halves[0] | halves[1]

    def _load_shared(self, slot: jax.Array, value: int, first: int, count: int, kept: jax.Array | None) -> jax.Array:
        """`load` of the one head where two tokens of 8 bits share a row of words."""
        pieces = []
        for piece in range(self.config.num_pieces):
            words = load_row(self.buffer, (slot,), first // 2, count // 2, piece)
            if kept is not None:
                words = words & kept
            numbers = elements(words >> (8 * value), jnp.dtype("uint16")).astype(jnp.uint8)
            pieces.append(recast(numbers, self.buffer.dtype).astype(self.config.pushed_dtype))
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)

    def _window(self, slot: jax.Array, page: jax.Array | int, count: jax.Array | int) -> Ref:
        """The part of the buffer that `count` pages of a block fill."""
        size = self.pages.shape[1]
        return self.buffer.at[slot, pl.ds(page * size, count * size), pl.ds(0, self.pages.shape[2])]

    def _start_page(self, entry: jax.Array, j: jax.Array | int, slot: jax.Array) -> None:
        source = named_page(self.pages, self.items.entries[entry])
        pltpu.make_async_copy(source, self._window(slot, j, 1), self.arrived.at[slot]).start()


def _element(word: jax.Array, place: int, dtype: jnp.dtype, pushed_dtype: str) -> jax.Array:
    """Element `place` of each 32-bit word, in `dtype`."""
    bits = 8 * jnp.dtype(dtype).itemsize
    if bits == 32:
        return recast(word, dtype)
    if bits == 16:
        return recast((word >> (16 * place)).astype(jnp.uint16), dtype)
    if dtype == jnp.int8 or pushed_dtype == dtype:  # the halves of the words in one register, then those of the halves
        half = (word >> (16 * (place // 2))).astype(jnp.uint16)
        return recast((half >> (8 * (place % 2))).astype(jnp.uint8), dtype)
    return recast((word >> (8 * place)).astype(jnp.uint8), dtype)

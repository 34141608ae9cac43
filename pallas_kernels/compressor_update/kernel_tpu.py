"""compressor_update for TPU: writes the new states, then pools each entry from the pages that hold its tokens.

Flow:    KV, biased scores (XLA) -> states -> [kernel_tpu] -> pages in place, entries

Grid: a step per entry and one more. Step 0 writes all new states, a DMA for each run of slots inside a page; step w
then starts the DMAs of entry w's states and pools entry w - 1. Bytes: 4 * lanes a state written, and tokens of an entry
times as many read. Scores and weights of a number are those of its own lane, so nothing moves between lanes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compressor_update.reference import biased_states, new_entries
from pallas_kernels.kv_write.kernel_tpu import copy_rows, write_runs
from pallas_kernels.latent_pages import state_slots
from pallas_kernels.schedule import Batch
from pallas_kernels.slab_pages import replaced
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.dma_runs import LARGEST_TABLE_ROWS
from pallas_kernels.tpu.mosaic import LANES, Copy, Ref, load_row
from pallas_kernels.tpu.slab_refs import reason_of_slabs

_VMEM_LIMIT_BYTES = 32 << 20
_LARGEST_BUFFER_BYTES = 24 << 20  # of VMEM, for the states of two entries
_MOST_SOURCES = 1 << 16  # in scalar memory


def reason_not_supported(
    kv: jax.Array,
    pages: tuple[jax.Array, ...],
    position_bias: jax.Array,
    *,
    overlap: bool,
    page_size: int,
    room: int,
) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    ratio, width = position_bias.shape
    if pages[0].ndim != 5:
        return "TPU kernels read packed latent pages; make them by latent_layout(platform='tpu')"
    pool = _Pool(ratio, width, overlap, page_size)
    if pool.dim % LANES:
        return f"TPU kernels pool entries of a multiple of {LANES} numbers, got {pool.dim}"
    if kv.shape[0] > LARGEST_TABLE_ROWS:
        return f"the TPU kernel writes up to {LARGEST_TABLE_ROWS} tokens a call, got {kv.shape[0]}"
    if 2 * pool.num_states * 8 * width > _LARGEST_BUFFER_BYTES:
        return f"states of an entry exceed {_LARGEST_BUFFER_BYTES >> 21} MiB of VMEM: {pool.num_states} of {width * 2}"
    if room * pool.num_units > _MOST_SOURCES:
        return f"TPU kernels pool from up to {_MOST_SOURCES} pieces of pages a call, got {room * pool.num_units}"
    return reason_of_slabs(pages[0])


@dataclass(frozen=True)
class _Pool:
    """What an entry is made of."""

    ratio: int  # tokens of an entry
    width: int  # numbers of KV of a state, and of scores
    overlap: bool
    page_size: int

    @property
    def dim(self) -> int:
        """Numbers of an entry."""
        return self.width // 2 if self.overlap else self.width

    @property
    def num_states(self) -> int:
        """States that an entry reads."""
        return self.ratio * (1 + self.overlap)

    @property
    def unit(self) -> int:
        """States of a DMA: as many as never cross the end of a page."""
        return math.gcd(self.ratio, self.page_size)

    @property
    def num_units(self) -> int:
        """DMAs of an entry."""
        return self.num_states // self.unit

    def slots(self, block_tables: jax.Array, seq: jax.Array, entry: jax.Array) -> jax.Array:
        """int32[room, units] first slot of each DMA; the null page's where there is no such token."""
        first = jnp.arange(-self.ratio * self.overlap, self.ratio, self.unit, dtype=jnp.int32)
        token = entry[:, None] * self.ratio + first
        named = (token >= 0) & (entry[:, None] >= 0)
        slots = state_slots(block_tables, self.page_size, seq[:, None], jnp.maximum(token, 0))
        return jnp.where(named, slots, 0)


@functools.partial(jax.jit, static_argnames=("overlap", "page_size", "room"))
def compressor_update(
    kv: jax.Array,  # [T, coff * D]
    scores: jax.Array,  # [T, coff * D]
    pages: tuple[jax.Array, ...],  # packed: (float32[pages, page_size, pieces, 1, 128],)
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    slot_mapping: jax.Array,  # int32[T]
    position_bias: jax.Array,  # float32[R, coff * D]
    *,
    overlap: bool,
    page_size: int,
    room: int,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The fields of `CompressorOutput`, N being `room`."""
    ratio, width = position_bias.shape
    pool = _Pool(ratio, width, overlap, page_size)
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    states, row_shape = biased_states(kv, scores, batch, position_bias), pages[0].shape[2:]
    seq, entry = new_entries(batch, ratio, room)
    results = call(
        lambda refs: _Step(pool, refs).run(),
        _Refs,
        name=f"compressor_r{pool.ratio}_d{pool.dim}_p{page_size}",
        grid=jnp.sum(entry >= 0, dtype=jnp.int32) + 1,
        scalars={
            "runs": write_runs(slot_mapping, page_size),
            "slots": pool.slots(block_tables, seq, entry).reshape(-1),
            "entries": entry,
        },
        inputs={"states": Operand(states.reshape(-1, *row_shape), IN_HBM)},
        outputs={
            "out": Operand(
                jax.ShapeDtypeStruct((room, 1, pool.dim), jnp.float32),
                pl.BlockSpec((1, 1, pool.dim), lambda w, *_: (jnp.maximum(w - 1, 0), 0, 0)),
            ),
        },
        scratch={
            "buffer": pltpu.VMEM((2, pool.num_states, *row_shape), jnp.float32),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
            "left": pltpu.SemaphoreType.DMA,
        },
        in_place={"pages": pages[0]},
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )
    entries = jnp.where((entry >= 0)[:, None], results["out"][:, 0], 0.0)
    return entries, jnp.where(entry >= 0, entry * ratio, -1), replaced(pages, 0, results["pages"])


class _Refs(NamedTuple):
    """References of a step; the output is that of the entry before."""

    runs: Ref  # SMEM int32[3 * T + 1] of `copy_runs`
    slots: Ref  # SMEM int32[room * units]
    entries: Ref  # SMEM int32[room]
    states: Ref  # HBM float32[T, pieces, 1, 128] new ones
    out: Ref  # float32[1, 1, D]
    pages: Ref  # HBM float32[pages, page_size, pieces, 1, 128]
    buffer: Ref  # float32[2, states of an entry, pieces, 1, 128]
    arrived: Ref  # DMA semaphores, one a buffer
    left: Ref  # DMA semaphore


@dataclass(frozen=True)
class _Step:
    """One step of the grid."""

    pool: _Pool
    refs: _Refs

    def run(self) -> None:
        """Starts the DMAs of this step's entry; pools the entry before."""
        step, last = pl.program_id(0), pl.num_programs(0) - 1
        pl.when(step == 0)(self._write)
        pl.when(step < last)(lambda: self._start(step))
        pl.when(step > 0)(lambda: self._pool_entry(step - 1))

    def _write(self) -> None:
        copy_rows(self.refs.runs, self.refs.states, self.refs.pages, self.refs.left)

    def _start(self, entry: jax.Array) -> None:
        def unit(i: jax.Array, carry: None) -> None:
            self._copy(entry, i, entry & 1).start()
            return carry

        lax.fori_loop(0, self.pool.num_units, unit, None)

    def _copy(self, entry: jax.Array, i: jax.Array, slot: jax.Array) -> Copy:
        pool = self.pool
        first = self.refs.slots[entry * pool.num_units + i]
        page = lax.div(first, pool.page_size)
        source = self.refs.pages.at[page, pl.ds(first - page * pool.page_size, pool.unit)]
        return pltpu.make_async_copy(source, self._target(i, slot), self.refs.arrived.at[slot])

    def _target(self, i: jax.Array, slot: jax.Array) -> Ref:
        return self.refs.buffer.at[slot, pl.ds(i * self.pool.unit, self.pool.unit)]

    def _pool_entry(self, entry: jax.Array) -> None:
        pool, slot = self.pool, entry & 1
        window = self.refs.buffer.at[slot]
        pltpu.make_async_copy(window, window, self.refs.arrived.at[slot]).wait()  # for as many bytes as it has
        has_before = self.refs.entries[entry] > 0
        for piece in range(pool.dim // LANES):
            parts = [self._part(slot, piece, own=True)]
            if pool.overlap:
                scores, kv = self._part(slot, piece, own=False)
                parts.append((jnp.where(has_before, scores, -jnp.inf), kv))
            top = functools.reduce(jnp.maximum, (jnp.max(s, axis=0, keepdims=True) for s, _ in parts))
            weights = [jnp.exp(s - top) for s, _ in parts]
            total = sum(jnp.sum(w, axis=0, keepdims=True) for w in weights)
            pooled = sum(jnp.sum(w * kv, axis=0, keepdims=True) for w, (_, kv) in zip(weights, parts, strict=True))
            self.refs.out[0, :, pl.ds(piece * LANES, LANES)] = pooled / total

    def _part(self, slot: jax.Array, piece: int, *, own: bool) -> tuple[jax.Array, jax.Array]:
        """(scores, KV) float32[ratio, 128] of the entry's own tokens, or of those before."""
        pool = self.pool
        first = pool.ratio if own and pool.overlap else 0
        column = piece + (pool.dim // LANES if own and pool.overlap else 0)
        return self._load(slot, first, column + pool.width // LANES), self._load(slot, first, column)

    def _load(self, slot: jax.Array, first: int, piece: int) -> Any:
        words = load_row(self.refs.buffer, (slot,), first, self.pool.ratio, piece)
        return lax.bitcast_convert_type(words, jnp.float32)

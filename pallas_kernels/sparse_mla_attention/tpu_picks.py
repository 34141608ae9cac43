"""Pass over the compressed entries that each query names, for TPU: a DMA per entry, many in flight.

Flow:    queries + indices + tables + pages + state -> [pick_pass] -> (out, lse)

Grid: a step per token and one more. Step w starts the DMAs of token w's entries, all of them, into one of two buffers,
and attends token w - 1 from the other; the scalar unit starts DMAs while the vector units attend, part by part. A DMA
moves the row of a page that holds the entry (`packing` states); indices that name nothing move the null page's. The
token's indices, and its sequence's row of the tables, come to scalar memory by the grid's pipeline. Bytes of a token:
entries * 4 * lanes, and the state. Flops: 4 * heads * lanes an entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layouts import cdiv
from pallas_kernels.sparse_mla_attention.tpu_attention import LatentAttention, PassState
from pallas_kernels.sparse_mla_attention.tpu_plan import LaunchConfig
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.latent_blocks import log2
from pallas_kernels.tpu.lse import lse_shape
from pallas_kernels.tpu.mosaic import LANES, Copy, Ref, is_interpreted, load_row
from pallas_kernels.tpu.slab_refs import first_word_row, row_unit, word_rows

LARGEST_BUFFER_BYTES = 24 << 20  # of VMEM, for the entries of two tokens
PART = LANES  # entries that are attended at a time
_GROUP = 16  # DMAs of a trip of the loop that starts them alone
_VMEM_LIMIT_BYTES = 48 << 20


class Picks(NamedTuple):
    """What the tokens name, as the kernel reads it."""

    entries: jax.Array  # int32[T, K] with K a multiple of the parts; one past the last column of the table: none
    num_groups: jax.Array  # int32[T] groups of entries up to the last that names something
    seq: jax.Array  # int32[T]

    @classmethod
    def of(cls, indices: jax.Array, counts: jax.Array, seq: jax.Array, none: int) -> Picks:
        """The picks of int32[T, K] indices that a token sees: those below its count int32[T]; -1 names nothing."""
        width = cdiv(indices.shape[1], PART) * PART
        indices = jnp.pad(indices, [(0, 0), (0, width - indices.shape[1])], constant_values=-1)
        seen = (indices >= 0) & (indices < counts[:, None])
        last = jnp.max(jnp.where(seen, jnp.arange(1, width + 1, dtype=jnp.int32), 0), axis=1)
        return cls(jnp.where(seen, indices, none), (last + _GROUP - 1) // _GROUP, seq)


def row_shifts(tables: jax.Array, pages: jax.Array) -> jax.Array:
    """int32[S, 1, n], a number per column: from a sequence's row of states to the row in the memory of all pages.

    In `row_unit` rows of words. The column after the last stands for the null page.
    """
    size = cdiv(tables.shape[1] + 1, LANES) * LANES
    tables = jnp.pad(tables, [(0, 0), (0, size - tables.shape[1])])
    rows, pieces = pages.shape[1:3]
    columns = jnp.arange(size, dtype=jnp.int32)
    return ((first_word_row(pages, tables) - columns * rows * pieces) // row_unit(pages))[:, None]


def pick_pass(
    config: LaunchConfig,
    span: jax.Array,  # int32[2] first token of the launch, number of its tokens
    picks: Picks,
    none: int,  # what names nothing
    q: jax.Array,  # [T * heads, lanes]
    pages: jax.Array,  # [pages, rows, pieces, packing, 128]
    shifts: jax.Array,  # int32[S, 1, n] of `row_shifts`
    state: PassState | None,  # None: the tokens have no window
    sinks: jax.Array | None,  # float32[chunk, 128]
) -> dict[str, Any]:
    """`out` (and `lse`, else None) of the launch's tokens; the rest is undefined."""
    num_tokens, width = picks.entries.shape
    last = num_tokens - 1

    def own(w: jax.Array, span: Ref, *_: Any) -> jax.Array:
        return jnp.minimum(span[0] + w, last)

    def before(w: jax.Array, span: Ref, *_: Any) -> jax.Array:
        return jnp.minimum(span[0] + jnp.maximum(w - 1, 0), last)

    def rows(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((config.heads, lanes), lambda *a: (before(*a), 0))

    def in_smem(size: int, index: Callable[..., Any]) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, size), index, memory_space=pltpu.SMEM)

    by_part = picks.entries.reshape(num_tokens, -1, PART)
    row = picks.entries[:, None] >> log2(config.cache.places)
    of_seq = in_smem(shifts.shape[2], lambda w, span, groups, seq: (seq[own(w, span)], 0, 0))
    lse = None
    if config.return_lse:
        shape = lse_shape(q.shape[0] // config.heads, config.heads)
        by_token = pl.BlockSpec((1, *shape[1:]), lambda *a: (before(*a), 0, 0))
        lse = Operand(jax.ShapeDtypeStruct(shape, jnp.float32), by_token)
    return call(
        lambda refs: _Step(config, none, refs).run(),
        _Refs,
        name=f"sparse_picks_k{width}_h{config.heads}_p{config.cache.page_size}",
        grid=span[1] + 1,
        scalars={"span": span, "num_groups": picks.num_groups, "seq": picks.seq},
        inputs={
            "rows": Operand(row, in_smem(width, lambda *a: (own(*a), 0, 0))),
            "shifts": Operand(shifts, of_seq),
            "entries": Operand(by_part, pl.BlockSpec((1, *by_part.shape[1:]), lambda *a: (before(*a), 0, 0))),
            "q": Operand(q, rows(q.shape[1])),
            "before": None if state is None else PassState(*(Operand(x, rows(x.shape[1])) for x in state)),
            "sinks": None if sinks is None else Operand(sinks, pl.BlockSpec(sinks.shape, lambda *_: (0, 0))),
            "pages": Operand(word_rows(pages, row_unit(pages)), IN_HBM),
        },
        outputs={"out": Operand(jax.ShapeDtypeStruct(q.shape, q.dtype), rows(q.shape[1])), "lse": lse},
        scratch={
            "buffers": _Buffers(*[pltpu.VMEM((1, width, *pages.shape[2:]), pages.dtype)] * 2),
            "vectors": pltpu.VMEM((PART, q.shape[1]), q.dtype),
            "state": PassState(*(pltpu.VMEM((config.heads, n), jnp.float32) for n in (q.shape[1], LANES, LANES))),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        },
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )


class _Buffers(NamedTuple):
    """Two arrays, not one with a first axis: the compiler then sees that DMAs into one leave the other alone."""

    even: Ref  # [1, K, pieces, packing, 128] entries of every other step's token
    odd: Ref


class _Refs(NamedTuple):
    """References of a step; but for `rows` and `shifts`, blocks are those of the token before."""

    span: Ref  # SMEM int32[2] first token, number of tokens
    num_groups: Ref  # SMEM int32[T] of `Picks`
    seq: Ref  # SMEM int32[T]
    rows: Ref  # SMEM int32[1, 1, K] the sequence's row of states that holds each entry
    shifts: Ref  # SMEM int32[1, 1, n] of `row_shifts`
    entries: Ref  # int32[1, parts, 128]
    q: Ref  # [heads, lanes]
    before: PassState | None  # what the window's pass left; None: there was none
    sinks: Ref | None  # float32[heads, 128]
    pages: Ref  # HBM [n, pieces, packing, 128], or [n, 1, packing, 128]
    out: Ref  # [heads, lanes]
    lse: Ref | None  # float32[1, rows of heads, 128]
    buffers: _Buffers
    vectors: Ref  # [128, lanes] of a part's entries
    state: PassState  # of the heads
    arrived: Ref  # DMA semaphores, one a buffer


@dataclass(frozen=True)
class _Step:
    """One step of the grid."""

    config: LaunchConfig
    none: int
    refs: _Refs

    def run(self) -> None:
        """Starts the DMAs of this step's token; attends the token before."""
        step, last, num_tokens = pl.program_id(0), pl.num_programs(0) - 1, self.refs.num_groups.shape[0]
        token = self.refs.span[0] + step
        own = jnp.where(step < last, self.refs.num_groups[jnp.minimum(token, num_tokens - 1)], 0)
        before = jnp.where(step > 0, self.refs.num_groups[jnp.maximum(token - 1, 0)], 0)
        for slot in range(2):
            pl.when(step & 1 == slot)(functools.partial(self._turn, own, before, step > 0, slot))

    def _turn(self, own: jax.Array, before: jax.Array, has_before: jax.Array, slot: int) -> None:
        """One step, which fills buffer `slot`: with whole parts while parts of the other are attended."""
        refs, per_part = self.refs, PART // _GROUP
        num_parts = lax.div(before + per_part - 1, per_part)
        both = jnp.minimum(num_parts, lax.div(own, per_part))

        def some(i: jax.Array, carry: None) -> None:
            self._start(i * _GROUP, _GROUP, slot)
            return carry

        lax.fori_loop(both * per_part, own, some, None)

        @pl.when(has_before)
        def _() -> None:
            attention = LatentAttention(refs.state, self.config.scale)
            if refs.before is None:
                attention.reset()
            else:
                attention.copy(refs.before, attention.state)
            window = self._buffer(1 - slot).at[0, pl.ds(0, before * _GROUP)]
            wait = pltpu.make_async_copy(window, window, refs.arrived.at[1 - slot]).wait  # for as many bytes as it has
            pl.when(before > 0)(wait)

            def start_and_attend(i: jax.Array, carry: None) -> None:
                self._start(i * PART, PART, slot)
                self._attend(attention, i, 1 - slot)
                return carry

            def attend(i: jax.Array, carry: None) -> None:
                self._attend(attention, i, 1 - slot)
                return carry

            lax.fori_loop(0, both, start_and_attend, None)
            lax.fori_loop(both, num_parts, attend, None)
            attention.finish(refs.sinks, refs.out, refs.lse)

    def _buffer(self, slot: int) -> Ref:
        return self.refs.buffers[slot]

    def _start(self, first: jax.Array, count: int, slot: int) -> None:
        def one(j: jax.Array | int, carry: None) -> None:
            self._copy(first + j, slot).start()
            return carry

        if is_interpreted():  # whose program would be large
            lax.fori_loop(0, count, one, None)
            return
        for j in range(count):
            one(j, None)

    def _copy(self, i: jax.Array, slot: int) -> Copy:
        row = self.refs.rows[0, 0, i]
        shift, pieces = self.refs.shifts[0, 0, row >> log2(self.config.cache.rows)], self._buffer(slot).shape[2]
        if self.refs.pages.shape[1] == pieces:
            source = self.refs.pages.at[row + shift]
        else:
            source = self.refs.pages.at[pl.ds(row * pieces + shift, pieces), 0]
        return pltpu.make_async_copy(source, self._target(i, slot), self.refs.arrived.at[slot])

    def _target(self, i: jax.Array, slot: int) -> Ref:
        return self._buffer(slot).at[0, i]

    def _attend(self, attention: LatentAttention, i: jax.Array, slot: int) -> None:
        entries = self.refs.entries[0, pl.ds(i, 1), :]
        self._load(entries, i * PART, slot)
        seen = entries < self.none
        attention.over_chunks(lambda _, rows: attention.update(rows, self.refs.q[rows], self.refs.vectors[...], seen))

    def _load(self, entries: jax.Array, first: jax.Array, slot: int) -> None:
        """Vectors of a part's entries int32[1, part]: of each row what stands in the entry's place, zero for none."""
        cache = self.config.cache
        down = jnp.transpose(jnp.broadcast_to(entries, (PART, LANES)))  # in every lane
        place = down & (cache.places - 1) if cache.places > 1 else 0
        pieces = range(cache.reader.num_pieces)
        words = [load_row(self._buffer(slot), (0,), first, PART, piece) for piece in pieces]
        for piece, x in enumerate(cache.reader.vectors(words, place, down < self.none)):
            self.refs.vectors[:, pl.ds(piece * LANES, LANES)] = x

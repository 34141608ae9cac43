"""Pass over the compressed entries that each query names, for TPU: a DMA per entry, many in flight.

Flow:    queries + indices + tables + pages + state -> [pick_pass] -> (out, lse)

Grid: a step per token and one more. Step w starts the DMAs of token w's entries, all of them, into one of two buffers,
then attends token w - 1 from the other. A DMA moves the row of a page that holds the entry (`packing` states); indices
that name nothing move the null page's. The token's indices, and its sequence's row of the tables, come to scalar memory
by the grid's pipeline. Bytes of a token: entries * 4 * lanes, and the state. Flops: 4 * heads * lanes an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layouts import cdiv
from pallas_kernels.mosaic import LANES, Copy, Ref
from pallas_kernels.sparse_mla_attention.tpu_attention import LatentAttention, PassState
from pallas_kernels.sparse_mla_attention.tpu_plan import LaunchConfig
from pallas_kernels.tpu_call import IN_HBM, Operand, call
from pallas_kernels.tpu_entries import row_words
from pallas_kernels.tpu_states import StatePages, log2

LARGEST_BUFFER_BYTES = 24 << 20  # of VMEM, for the entries of two tokens
_GROUP = 16  # DMAs of a trip of the loop that starts them
_VMEM_LIMIT_BYTES = 48 << 20


class Picks(NamedTuple):
    """What the tokens name, as the kernel reads it."""

    entries: jax.Array  # int32[T, K] with K a multiple of the parts; one past the last column of the table: none
    num_groups: jax.Array  # int32[T] groups of entries up to the last that names something
    seq: jax.Array  # int32[T]

    @classmethod
    def of(cls, indices: jax.Array, counts: jax.Array, seq: jax.Array, none: int, part: int) -> Picks:
        """Of indices int32[T, K], of which a token may see those below its count int32[T]; -1 names nothing."""
        width = cdiv(indices.shape[1], part) * part
        indices = jnp.pad(indices, [(0, 0), (0, width - indices.shape[1])], constant_values=-1)
        seen = (indices >= 0) & (indices < counts[:, None])
        last = jnp.max(jnp.where(seen, jnp.arange(1, width + 1, dtype=jnp.int32), 0), axis=1)
        return cls(jnp.where(seen, indices, none), (last + _GROUP - 1) // _GROUP, seq)


def row_shifts(tables: jax.Array, cache: StatePages) -> jax.Array:
    """int32[S, 1, n], a number per column: from a sequence's row of states to the row in all pages.

    The column after the last stands for the null page.
    """
    size = cdiv(tables.shape[1] + 1, LANES) * LANES
    tables = jnp.pad(tables, [(0, 0), (0, size - tables.shape[1])])
    return ((tables - jnp.arange(size, dtype=jnp.int32)) * cache.rows)[:, None]


def part_entries(num_picks: int, num_heads: int) -> int:
    """Entries that are attended at a time."""
    most = 512 if num_heads <= 64 else 256
    return min(most, cdiv(num_picks, LANES) * LANES)


def pick_pass(
    config: LaunchConfig,
    span: jax.Array,  # int32[2] first token of the launch, number of its tokens
    picks: Picks,
    part: int,
    none: int,  # what names nothing
    q: jax.Array,  # [T * heads, lanes]
    pages: jax.Array,  # [pages, rows, packing, lanes]
    shifts: jax.Array,  # int32[S, 1, n] of `row_shifts`
    state: PassState,
    sinks: jax.Array | None,  # float32[chunk, 128]
) -> dict[str, jax.Array]:
    """`out` (and `lse`) of the launch's tokens; the rest is undefined."""
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

    by_part = picks.entries.reshape(num_tokens, -1, part)
    inputs = {
        "rows": Operand(
            picks.entries[:, None] >> log2(config.cache.places), in_smem(width, lambda *a: (own(*a), 0, 0))
        ),
        "shifts": Operand(shifts, in_smem(shifts.shape[2], lambda w, span, groups, seq: (seq[own(w, span)], 0, 0))),
        "entries": Operand(by_part, pl.BlockSpec((1, *by_part.shape[1:]), lambda *a: (before(*a), 0, 0))),
        "q": Operand(q, rows(q.shape[1])),
        **{f"{name}_in": Operand(x, rows(x.shape[1])) for name, x in state._asdict().items()},
    }
    if sinks is not None:
        inputs["sinks"] = Operand(sinks, pl.BlockSpec(sinks.shape, lambda *_: (0, 0)))
    inputs["pages"] = Operand(pages.reshape(-1, *pages.shape[2:]), IN_HBM)
    outputs = {"out": Operand(jax.ShapeDtypeStruct(q.shape, q.dtype), rows(q.shape[1]))}
    if config.return_lse:
        outputs["lse"] = Operand(jax.ShapeDtypeStruct((q.shape[0], LANES), jnp.float32), rows(LANES))
    return call(
        lambda refs: _Step(config, part, none, refs).run(),
        name=f"sparse_picks_k{width}_h{config.heads}_p{config.cache.page_size}",
        grid=span[1] + 1,
        scalars={"span": span, "num_groups": picks.num_groups, "seq": picks.seq},
        inputs=inputs,
        outputs=outputs,
        scratch={
            "buffer": pltpu.VMEM((2, width, *pages.shape[2:]), pages.dtype),
            "vectors": pltpu.VMEM((part, q.shape[1]), q.dtype),
            "acc": pltpu.VMEM((config.heads, q.shape[1]), jnp.float32),
            "weight": pltpu.VMEM((config.heads, LANES), jnp.float32),
            "m": pltpu.VMEM((config.heads, LANES), jnp.float32),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        },
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )


@dataclass(frozen=True)
class _Step:
    """One step of the grid."""

    config: LaunchConfig
    part: int
    none: int
    refs: SimpleNamespace

    def run(self) -> None:
        """Starts the DMAs of this step's token; attends the token before."""
        step, last = pl.program_id(0), pl.num_programs(0) - 1
        token = self.refs.span[0] + step
        pl.when(step < last)(lambda: self._start(self.refs.num_groups[token], step & 1))
        pl.when(step > 0)(lambda: self._attend(self.refs.num_groups[token - 1], 1 - (step & 1)))

    def _start(self, num_groups: jax.Array, slot: jax.Array) -> None:
        def some(i: jax.Array, carry: None) -> None:
            for j in range(_GROUP):
                self._copy(i * _GROUP + j, slot).start()
            return carry

        lax.fori_loop(0, num_groups, some, None)

    def _copy(self, i: jax.Array, slot: jax.Array) -> Copy:
        row = self.refs.rows[0, 0, i]
        source = self.refs.pages.at[row + self.refs.shifts[0, 0, row >> log2(self.config.cache.rows)]]
        return pltpu.make_async_copy(source, self._target(i, slot), self.refs.arrived.at[slot])

    def _target(self, i: jax.Array, slot: jax.Array) -> Ref:
        return self.refs.buffer.at[slot, i]

    def _attend(self, num_groups: jax.Array, slot: jax.Array) -> None:
        refs = self.refs
        attention = LatentAttention(PassState(refs.acc, refs.weight, refs.m), self.config.scale)
        attention.copy(PassState(refs.acc_in, refs.weight_in, refs.m_in), attention.state)
        window = refs.buffer.at[slot, pl.ds(0, num_groups * _GROUP)]
        wait = pltpu.make_async_copy(window, window, refs.arrived.at[slot]).wait  # for as many bytes as it has
        pl.when(num_groups > 0)(wait)

        def one(i: jax.Array, carry: None) -> None:
            entries = refs.entries[0, pl.ds(i, 1), :]
            self._load(entries, i * self.part, slot)
            seen = entries < self.none
            attention.over_chunks(lambda _, rows: attention.update(rows, refs.q[rows], refs.vectors[...], seen))
            return carry

        per_part = self.part // _GROUP
        lax.fori_loop(0, lax.div(num_groups + per_part - 1, per_part), one, None)
        attention.finish(getattr(refs, "sinks", None), refs.out, getattr(refs, "lse", None))

    def _load(self, entries: jax.Array, first: jax.Array, slot: jax.Array) -> None:
        """Vectors of a part's entries int32[1, part]: of each row what stands in the entry's place, zero for none."""
        cache = self.config.cache
        reader = cache.reader
        for n in range(0, self.part, LANES):
            down = jnp.transpose(jnp.broadcast_to(entries[:, n : n + LANES], (LANES, LANES)))  # in every lane
            place = down & (cache.places - 1) if cache.places > 1 else 0
            words = [row_words(self.refs.buffer, slot, first + n, LANES, piece) for piece in range(reader.num_pieces)]
            for piece, x in enumerate(reader.vectors(words, place, down < self.none)):
                self.refs.vectors[pl.ds(n, LANES), pl.ds(piece * LANES, LANES)] = x

"""Pass over a run of states for TPU: the window of each query, or all its compressed entries.

Flow:    items + queries + pages (+ state) -> [run_pass] -> state for the next pass, or (out, lse)

Grid: a step per item and one more. Step w starts the DMAs of item w's first block and attends item w - 1, the next
block always under way meanwhile; a page is one DMA. Queries, state and results go by the grid's pipeline. Bytes of an
item: its pages, page_size * lanes each, and with a state twice 4 * rows * (lanes + 256). Flops: 4 * rows * lanes a
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla_attention.schedule import WindowBlocks
from pallas_kernels.sparse_mla_attention.tpu_attention import LatentAttention, PassState
from pallas_kernels.sparse_mla_attention.tpu_plan import LaunchConfig
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.latent_blocks import Run, StateBlocks, log2
from pallas_kernels.tpu.lse import lse_shape
from pallas_kernels.tpu.mosaic import LANES, Ref, load_row
from pallas_kernels.tpu.slab_refs import page_names
from pallas_kernels.tpu.token_blocks import Field
from pallas_kernels.tpu.token_specs import row_specs, table_spec, token_spec

_VMEM_LIMIT_BYTES = 48 << 20


class _Refs(NamedTuple):
    """References of a step; rows are those of the item before, `config.num_rows` of them."""

    items: Ref  # SMEM int32[fields * room] of `TokenBlocks`
    window_pages: Ref | None  # SMEM int32[room * most] pages of each item's window; None: a pass over entries
    q: Ref  # [rows, lanes]
    table: Ref | None  # SMEM int32[1, 1, n] pages of the item's sequence; None: a pass over the window
    next_table: Ref | None  # SMEM int32[1, 1, n] of the next item's
    before: PassState | None  # what another pass left; None: this is the first
    sinks: Ref | None  # float32[chunk, 128]
    pages: Ref  # HBM [pages, rows, pieces, packing, 128]
    out: Ref | None  # [rows, lanes]; None: this pass leaves its state
    lse: Ref | None  # float32[queries, rows of heads, 128]
    after: PassState | None  # for the next pass
    buffer: Ref  # [2, rows of a block, pieces, packing, 128]
    vectors: Ref  # [states of a block, lanes]
    state: PassState  # of the rows
    num_before: Ref  # SMEM int32[1]
    arrived: Ref  # DMA semaphores, one a buffer


def run_pass(
    config: LaunchConfig,
    items: WindowBlocks,
    q: jax.Array,  # [T * heads, lanes], a multiple of the blocks
    pages: jax.Array,  # [pages, rows, pieces, packing, 128]
    tables: jax.Array | None,  # int32[S, 1, n]: names of the pages of compressed entries
    state: PassState | None,
    sinks: jax.Array | None,  # float32[chunk, 128]
) -> dict[str, Any]:
    """`out` (and `lse`, else None), or `after` for the next pass, of the items' tokens; the rest is undefined."""
    blocks = row_specs(items.blocks, config.num_rows)
    table, next_table = (
        None if tables is None else Operand(tables, table_spec(items.blocks, tables.shape[2], ahead))
        for ahead in (0, 1)
    )
    lanes = PassState(acc=q.shape[1], weight=LANES, m=LANES)
    out = lse = after = None
    if config.finishes:
        out = Operand(jax.ShapeDtypeStruct(q.shape, q.dtype), blocks(q.shape[1]))
        if config.return_lse:
            shape = lse_shape(q.shape[0] // config.heads, config.heads)
            lse = Operand(jax.ShapeDtypeStruct(shape, jnp.float32), token_spec(items.blocks, config.queries, LANES))
    else:
        after = PassState(*(Operand(jax.ShapeDtypeStruct((q.shape[0], n), jnp.float32), blocks(n)) for n in lanes))
    return call(
        lambda refs: _Step(config, items.blocks.room, refs).run(),
        _Refs,
        name=f"sparse_run_q{config.queries}_b{config.block_states}_p{config.cache.page_size}",
        grid=items.blocks.num_items + 1,
        scalars={
            "items": items.blocks.table,
            "window_pages": page_names(pages, items.pages) if tables is None else None,
        },
        inputs={
            "q": Operand(q, blocks(q.shape[1])),
            "table": table,
            "next_table": next_table,
            "before": None if state is None else PassState(*(Operand(x, blocks(x.shape[1])) for x in state)),
            "sinks": None if sinks is None else Operand(sinks, pl.BlockSpec(sinks.shape, lambda *_: (0, 0))),
            "pages": Operand(pages, IN_HBM),
        },
        outputs={"out": out, "lse": lse, "after": after},
        scratch={
            "buffer": pltpu.VMEM((2, config.block_rows, *pages.shape[2:]), pages.dtype),
            "vectors": pltpu.VMEM((config.block_states, q.shape[1]), q.dtype),
            "state": PassState(*(pltpu.VMEM((config.num_rows, n), jnp.float32) for n in lanes)),
            "num_before": pltpu.SMEM((1,), jnp.int32),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        },
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )


@dataclass(frozen=True)
class _Step:
    """One step of the grid."""

    config: LaunchConfig
    room: int
    refs: _Refs

    def run(self) -> None:
        """Attends the item before; the first block of this step's item gets under way."""
        step, last = pl.program_id(0), pl.num_programs(0) - 1
        pl.when(step == 0)(lambda: self._blocks.begin(lambda: self._run_of(0, is_next=True), last > 0))
        pl.when(step > 0)(lambda: self._attend(step - 1, step < last))

    @property
    def _blocks(self) -> StateBlocks:
        refs = self.refs
        return StateBlocks(
            self.config.cache, self.config.block_pages, refs.pages, refs.buffer, refs.arrived, refs.num_before
        )

    def _attend(self, item: jax.Array, has_next: jax.Array) -> None:
        refs, config = self.refs, self.config
        attention = LatentAttention(refs.state, config.scale)
        block = self._field(Field.BLOCK, item)
        begins = (item == 0) | (block != self._field(Field.BLOCK, jnp.maximum(item - 1, 0)))
        ends = ~has_next | (block != self._field(Field.BLOCK, jnp.minimum(item + 1, self.room - 1)))

        @pl.when(begins)
        def _() -> None:
            if refs.before is None:
                attention.reset()
            else:
                attention.copy(refs.before, attention.state)

        run, blocks = self._run_of(item, is_next=False), self._blocks

        def one(block: jax.Array, slot: jax.Array) -> None:
            first = blocks.first_state(run, block)
            self._load(run, first, slot)
            attention.over_chunks(lambda first_row, rows: self._update(attention, item, first, first_row, rows))

        blocks.walk(run, lambda: self._run_of(item + 1, is_next=True), has_next, one)

        @pl.when(ends)
        def _() -> None:
            if refs.after is None:
                attention.finish(refs.sinks, refs.out, refs.lse)
            else:
                attention.copy(attention.state, refs.after)

    def _field(self, field: Field, item: jax.Array | int) -> jax.Array:
        return self.refs.items[field * self.room + item]

    def _run_of(self, item: jax.Array | int, *, is_next: bool) -> Run:
        config, refs = self.config, self.refs
        pos, size = self._field(Field.POS, item), config.cache.page_size
        upper = self._upper(pos + self._field(Field.END, item) - 1)
        table, window_pages = refs.next_table if is_next else refs.table, refs.window_pages
        if table is not None:
            return Run(jnp.int32(0), upper, size, lambda j: table[0, 0, j])
        assert config.window is not None
        assert window_pages is not None
        lower = jnp.maximum(pos + self._field(Field.BEGIN, item) - config.window + 1, 0)
        most = window_pages.shape[0] // self.room
        return Run(lower, upper, size, lambda j: window_pages[item * most + j])

    def _upper(self, pos: jax.Array) -> jax.Array:
        """Last state that a token at `pos` sees."""
        return ((pos + 1) >> log2(self.config.tokens_per_state)) - 1

    def _load(self, run: Run, first: jax.Array, slot: jax.Array) -> None:
        """Vectors of a block, place by place, those that no row of the item sees as zero."""
        config = self.config
        reader, num_rows, places = config.cache.reader, config.block_rows, config.cache.places
        words = [load_row(self.refs.buffer, (slot,), 0, num_rows, piece) for piece in range(reader.num_pieces)]
        state = first + lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 0) * places
        for place in range(places):
            kept = (state + place >= run.lower) & (state + place <= run.upper)
            for piece, x in enumerate(reader.vectors(words, place, kept)):
                self.refs.vectors[pl.ds(place * num_rows, num_rows), pl.ds(piece * LANES, LANES)] = x

    def _update(self, attention: LatentAttention, item: jax.Array, first: jax.Array, first_row: Any, rows: Any) -> None:
        config, size = self.config, attention.chunk
        shape = (size, config.block_states)
        number = lax.broadcasted_iota(jnp.int32, shape, 1)  # in the order of _load
        row, place = number & (config.block_rows - 1), number >> log2(config.block_rows)
        state = first + row * config.cache.places + place
        token = (first_row + lax.broadcasted_iota(jnp.int32, (size, 1), 0)) >> log2(config.heads)
        own = (token >= self._field(Field.BEGIN, item)) & (token < self._field(Field.END, item))
        pos = self._field(Field.POS, item) + token
        seen = state <= jnp.where(own, self._upper(pos), -1)
        if config.window is not None:
            seen = seen & (state > pos - config.window)
        attention.update(rows, self.refs.q[rows], self.refs.vectors[...], seen)

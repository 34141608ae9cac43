"""Pass over a run of states for TPU: the window of each query, or all its compressed entries.

Flow:    items + queries + pages (+ state) -> [run_pass] -> state for the next pass, or (out, lse)

Grid: a step per item and one more. Step w starts the DMAs of item w's first block and attends item w - 1, the next
block always under way meanwhile; a page is one DMA. Queries, state and results go by the grid's pipeline. Bytes of an
item: its pages, page_size * lanes each, and with a state twice 4 * rows * (lanes + 256). Flops: 4 * rows * lanes a
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic import LANES, Copy, Ref
from pallas_kernels.sparse_mla_attention.tpu_attention import LatentAttention, PassState
from pallas_kernels.sparse_mla_attention.tpu_items import Field, TpuItems
from pallas_kernels.sparse_mla_attention.tpu_plan import LaunchConfig, log2
from pallas_kernels.tpu_call import IN_HBM, Operand, call
from pallas_kernels.tpu_entries import row_words

_VMEM_LIMIT_BYTES = 48 << 20


def run_pass(
    config: LaunchConfig,
    items: TpuItems,
    q: jax.Array,  # [T * heads, lanes], a multiple of the blocks
    pages: jax.Array,  # [pages, rows, packing, lanes]
    tables: jax.Array | None,  # int32[S, 1, n]: of compressed entries
    state: PassState | None,
    sinks: jax.Array | None,  # float32[chunk, 128]
) -> dict[str, jax.Array]:
    """`out` (and `lse`) or `acc`, `weight`, `m` of the items' tokens; the rest is undefined."""
    scalars = {"items": items.table}
    blocks = _blocks_of_items(config, items.room)
    inputs = {"q": Operand(q, blocks(q.shape[1]))}
    if tables is None:
        scalars["window_pages"] = items.window_pages
    else:
        for name, ahead in (("table", 1), ("next_table", 0)):
            inputs[name] = Operand(tables, _row_of_item(tables, items.room, ahead))
    if state is not None:
        inputs |= {f"{name}_in": Operand(x, blocks(x.shape[1])) for name, x in state._asdict().items()}
    if sinks is not None:
        inputs["sinks"] = Operand(sinks, pl.BlockSpec(sinks.shape, lambda *_: (0, 0)))
    inputs["pages"] = Operand(pages, IN_HBM)
    lanes = {"acc": q.shape[1], "weight": LANES, "m": LANES}
    num_rows = q.shape[0]
    if config.finishes:
        shapes = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
        if config.return_lse:
            shapes["lse"] = jax.ShapeDtypeStruct((num_rows, LANES), jnp.float32)
    else:
        shapes = {f"{name}_out": jax.ShapeDtypeStruct((num_rows, n), jnp.float32) for name, n in lanes.items()}
    return call(
        lambda refs: _Step(config, items.room, refs).run(),
        name=f"sparse_run_q{config.queries}_b{config.block_states}_p{config.cache.page_size}",
        grid=items.num_items + 1,
        scalars=scalars,
        inputs=inputs,
        outputs={name: Operand(shape, blocks(shape.shape[1])) for name, shape in shapes.items()},
        scratch={
            "buffer": pltpu.VMEM((2, config.block_rows, *pages.shape[2:]), pages.dtype),
            "vectors": pltpu.VMEM((config.block_states, q.shape[1]), q.dtype),
            **{name: pltpu.VMEM((config.num_rows, n), jnp.float32) for name, n in lanes.items()},
            "num_blocks": pltpu.SMEM((1,), jnp.int32),  # of all items before: its parity names the next buffer
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        },
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )


def rows_of_tables(tables: jax.Array) -> jax.Array:
    """int32[S, 1, n] of int32[S, Pc]: rows for scalar memory."""
    return jnp.pad(tables, [(0, 0), (0, -tables.shape[1] % LANES)])[:, None]


def _blocks_of_items(config: LaunchConfig, room: int) -> Any:
    """lanes -> spec of a block of tokens, that of the item which a step attends."""

    def index(w: jax.Array, items: Ref, *_: Any) -> tuple[Any, int]:
        return items[Field.BLOCK * room + jnp.maximum(w - 1, 0)], 0

    return lambda lanes: pl.BlockSpec((config.num_rows, lanes), index)


def _row_of_item(tables: jax.Array, room: int, ahead: int) -> pl.BlockSpec:
    """A row of the tables in scalar memory: that of the item before (`ahead` 1) or of the step's own number."""

    def index(w: jax.Array, items: Ref, *_: Any) -> tuple[Any, int, int]:
        return items[Field.SEQ * room + jnp.clip(w - ahead, 0, room - 1)], 0, 0

    return pl.BlockSpec((1, 1, tables.shape[2]), index, memory_space=pltpu.SMEM)


@dataclass(frozen=True)
class _Run:
    """States that an item sees: scalars."""

    lower: Any  # first state
    upper: Any  # last state, -1: none
    first_page: Any
    num_pages: Any


@dataclass(frozen=True)
class _Step:
    """One step of the grid."""

    config: LaunchConfig
    room: int
    refs: SimpleNamespace

    def run(self) -> None:
        """Attends the item before; starts the first block of this step's item."""
        step, last = pl.program_id(0), pl.num_programs(0) - 1

        @pl.when(step == 0)
        def _() -> None:
            self.refs.num_blocks[0] = 0
            pl.when(last > 0)(lambda: self._start(0, jnp.int32(0), jnp.int32(0), is_next=True))

        pl.when(step > 0)(lambda: self._attend(step - 1, step < last))

    def _attend(self, item: jax.Array, has_next: jax.Array) -> None:
        refs, config = self.refs, self.config
        attention = LatentAttention(PassState(refs.acc, refs.weight, refs.m), config.scale)
        block = self._field(Field.BLOCK, item)
        begins = (item == 0) | (block != self._field(Field.BLOCK, jnp.maximum(item - 1, 0)))
        ends = ~has_next | (block != self._field(Field.BLOCK, jnp.minimum(item + 1, self.room - 1)))

        @pl.when(begins)
        def _() -> None:
            if config.continues:
                attention.copy(PassState(refs.acc_in, refs.weight_in, refs.m_in), attention.state)
            else:
                attention.reset()

        num_blocks, before = self._num_blocks(self._run_of(item)), refs.num_blocks[0]

        def one(b: jax.Array, carry: None) -> None:
            slot = (before + b) & 1
            is_last = b + 1 == num_blocks
            pl.when(~is_last)(lambda: self._start(item, b + 1, 1 - slot, is_next=False))
            pl.when(is_last & has_next)(lambda: self._start(item + 1, jnp.int32(0), 1 - slot, is_next=True))
            self._wait(item, b, slot)
            self._load(item, b, slot)
            attention.over_chunks(lambda first, rows: self._update(attention, item, b, first, rows))
            return carry

        lax.fori_loop(0, num_blocks, one, None)
        nothing = (num_blocks == 0) & has_next
        pl.when(nothing)(lambda: self._start(item + 1, jnp.int32(0), before & 1, is_next=True))
        refs.num_blocks[0] = before + num_blocks

        @pl.when(ends)
        def _() -> None:
            if config.finishes:
                attention.finish(getattr(refs, "sinks", None), refs.out, getattr(refs, "lse", None))
            else:
                attention.copy(attention.state, PassState(refs.acc_out, refs.weight_out, refs.m_out))

    def _field(self, field: Field, item: jax.Array | int) -> jax.Array:
        return self.refs.items[field * self.room + item]

    def _run_of(self, item: jax.Array | int) -> _Run:
        config = self.config
        pos = self._field(Field.POS, item)
        upper = self._upper(pos + self._field(Field.END, item) - 1)
        lower = jnp.int32(0)
        if config.window is not None:
            lower = jnp.maximum(pos + self._field(Field.BEGIN, item) - config.window + 1, 0)
        shift = log2(config.cache.page_size)
        first_page = lower >> shift
        return _Run(lower, upper, first_page, jnp.where(upper < 0, 0, (upper >> shift) - first_page + 1))

    def _upper(self, pos: jax.Array) -> jax.Array:
        """Last state that a token at `pos` sees."""
        return ((pos + 1) >> log2(self.config.tokens_per_state)) - 1

    def _num_blocks(self, run: _Run) -> jax.Array:
        return (run.num_pages + self.config.block_pages - 1) >> log2(self.config.block_pages)

    def _pages_of_block(self, run: _Run, block: jax.Array) -> jax.Array:
        return jnp.minimum(run.num_pages - block * self.config.block_pages, self.config.block_pages)

    def _start(self, item: jax.Array | int, block: jax.Array, slot: jax.Array, *, is_next: bool) -> None:
        """Starts the DMAs of a block of the item that is attended, or of the next."""
        run, first = self._run_of(item), block * self.config.block_pages

        def page(j: jax.Array, carry: None) -> None:
            if self.config.window is None:
                table = self.refs.next_table if is_next else self.refs.table
                number = table[0, 0, first + j]
            else:
                most = self.refs.window_pages.shape[0] // self.room
                number = self.refs.window_pages[item * most + first + j]
            self._copy(number, j, slot).start()
            return carry

        lax.fori_loop(0, self._pages_of_block(run, block), page, None)

    def _copy(self, page: jax.Array, j: jax.Array, slot: jax.Array) -> Copy:
        return pltpu.make_async_copy(self.refs.pages.at[page], self._target(j, slot), self.refs.arrived.at[slot])

    def _target(self, j: jax.Array, slot: jax.Array) -> Ref:
        return self._window(slot, j, 1)

    def _window(self, slot: jax.Array, page: jax.Array | int, count: jax.Array | int) -> Ref:
        size = self.config.cache.rows
        return self.refs.buffer.at[slot, pl.ds(page * size, count * size)]

    def _wait(self, item: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        window = self._window(slot, 0, self._pages_of_block(self._run_of(item), block))
        pltpu.make_async_copy(window, window, self.refs.arrived.at[slot]).wait()  # for as many bytes as it has

    def _load(self, item: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Vectors of a block, place by place, those that no row of the item sees as zero."""
        config, run = self.config, self._run_of(item)
        reader, num_rows, places = config.cache.reader, config.block_rows, config.cache.places
        words = [row_words(self.refs.buffer, slot, 0, num_rows, piece) for piece in range(reader.num_pieces)]
        first = (run.first_page + block * config.block_pages) * config.cache.page_size
        state = first + lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 0) * places
        for place in range(places):
            kept = (state + place >= run.lower) & (state + place <= run.upper)
            for piece, x in enumerate(reader.vectors(words, place, kept)):
                self.refs.vectors[pl.ds(place * num_rows, num_rows), pl.ds(piece * LANES, LANES)] = x

    def _update(self, attention: LatentAttention, item: jax.Array, block: jax.Array, first_row: Any, rows: Any) -> None:
        config, size = self.config, attention.chunk
        base = (self._run_of(item).first_page + block * config.block_pages) * config.cache.page_size
        shape = (size, config.block_states)
        number = lax.broadcasted_iota(jnp.int32, shape, 1)  # in the order of _load
        shift = log2(config.block_rows)
        state = (number & (config.block_rows - 1)) * config.cache.places + (number >> shift) + base
        token = (first_row + lax.broadcasted_iota(jnp.int32, (size, 1), 0)) >> log2(config.heads)
        own = (token >= self._field(Field.BEGIN, item)) & (token < self._field(Field.END, item))
        pos = self._field(Field.POS, item) + token
        seen = state <= jnp.where(own, self._upper(pos), -1)
        if config.window is not None:
            seen = seen & (state > pos - config.window)
        attention.update(rows, self.refs.q[rows], self.refs.vectors[...], seen)

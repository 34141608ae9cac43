"""mla_paged_attention for TPU, in Pallas: one kernel source, launched for decode and for tiles of several queries.

Flow:    api -> [kernel_tpu] -> (out, lse)
Source:  the split by `distribution` is that of ragged paged attention v3 (vllm-project/tpu-inference)

No grid: a loop over the steps of the launch (`tpu_plan.Walk`), as many as the call really has. A step reads

    its blocks       one DMA a page into a ring of buffers, those of the next steps under way meanwhile; bytes: pages
                     seen * page_size * lanes, once for keys and values
    its queries      one DMA, where they are not those of the step before
    and writes       the rows of the items that end in it

A decode step holds blocks of several sequences where heads are few: one block's products alone would leave the matrix
unit waiting. Flops: 2 * queries * Hq * (Dl + Dr + Dl) per key.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import launches
from pallas_kernels.key_share import KeyShare
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention.tpu_attention import StepAttention
from pallas_kernels.mla_paged_attention.tpu_latents import LatentBlocks, buffer_shape
from pallas_kernels.mla_paged_attention.tpu_plan import LatentConfig, Step, Unit, Walk, padded_heads, whole_lanes
from pallas_kernels.mla_paged_attention.tpu_refs import Refs
from pallas_kernels.tpu.base2 import HIDDEN
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.item_plan import Field, num_fields, plan_items, seen_slots
from pallas_kernels.tpu.items import ItemTable
from pallas_kernels.tpu.limits import (
    SMALLEST_TILE,
    base2_sinks,
    flat_tables,
    lse_with_sinks,
    reason_of_sizes,
)
from pallas_kernels.tpu.lse import by_head, lse_shape
from pallas_kernels.tpu.mosaic import LANES, Copy
from pallas_kernels.tpu.slab_refs import page_names, reason_of_slabs

_VMEM_LIMIT_BYTES = 64 << 20


class Tuning(NamedTuple):
    """Sizes that a tuner may choose; None: by the shapes."""

    queries: int | None = None  # query tokens of a tile, a power of two, at least 8
    units: int | None = None  # blocks of a decode step
    decode_block: int | None = None  # slots of a KV block, a power of two, at least 128
    tile_block: int | None = None
    decode_part: int | None = None  # slots of a softmax update
    tile_part: int | None = None
    chunk_rows: int = 256  # rows of a matrix product of a tile
    ahead: int = 1  # products whose scores are computed before the softmax of an earlier one
    decode_buffers: int = 4  # steps in VMEM, a power of two
    tile_buffers: int = 2


def reason_not_supported(latent: LatentPages, mask: MaskRule, share: KeyShare | None = None) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    array = latent.array
    if array.ndim != 5:
        return "TPU kernels read packed latent pages; make them by latent_layout(platform='tpu')"
    if array.dtype == jnp.float16:
        return "TPU has no arithmetic on float16 pages; use bfloat16"
    return reason_of_slabs(array) or reason_of_sizes(latent.page_size, mask, share)


@functools.partial(
    jax.jit,
    static_argnames=("mask", "sm_scale", "soft_cap", "page_size", "return_lse", "is_decode", "tuning", "tables_in_hbm"),
)
def mla_paged_attention(
    q_nope: jax.Array,  # [T, Hq, Dl]
    q_pe: jax.Array,  # [T, Hq, Dr]
    pages: tuple[jax.Array, ...],  # packed: ([pages, rows, pieces, packing, 128],)
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    mask: MaskRule,
    sm_scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    page_size: int,
    return_lse: bool,
    share: KeyShare | None = None,
    is_decode: bool = False,  # token i is the query of sequence i
    tuning: Tuning = Tuning(),  # noqa: B008
    tables_in_hbm: bool | None = None,  # None: where they exceed scalar memory
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, Hq, Dl] in the dtype of `q_nope`, lse float32[T, Hq] or None) as `AttentionOutput` says."""
    num_tokens, num_heads, latent_dim = q_nope.shape
    num_seqs, num_columns = block_tables.shape
    tables, ranks = (
        flat_tables(page_names(pages[0], block_tables), tables_in_hbm, num_tokens),
        1 if share is None else share.size,
    )
    is_decode = is_decode or num_tokens == 1
    if is_decode:  # whatever its sequences are called
        distribution = distribution.at[0].set(distribution[2])
    decoding, others = launches.split(seq_lens, query_start_loc, distribution, mask)

    def configured(queries: int) -> LatentConfig:
        return LatentConfig(
            mask=mask,
            sm_scale=sm_scale,
            soft_cap=soft_cap,
            heads=padded_heads(num_heads),
            head_dim=latent_dim + q_pe.shape[-1],
            lanes=whole_lanes(latent_dim + q_pe.shape[-1]),
            value_lanes=whole_lanes(latent_dim),
            page_size=page_size,
            compute_dtype=_compute_dtype(q_nope.dtype, pages[0].dtype),
            queries=queries,
            **_sizes(
                queries,
                padded_heads(num_heads),
                seen_slots(mask, queries, num_columns, page_size, ranks),
                page_size,
                tuning,
            ),
            has_sinks=sinks is not None,
            has_k_scale=k_scale is not None,
            return_lse=return_lse,
            table_stride=tables.stride,
            tables_in_hbm=tables.in_hbm,
            context_size=None if share is None else share.size,
        )

    def launch(config: LatentConfig, num_queries: int, items: tuple[jax.Array, jax.Array]) -> launches.Result:
        q = _query_rows(q_nope[:num_queries], q_pe[:num_queries], config)
        out, lse = _launch(config, items, tables.entries, q, pages[0], sinks, k_scale)
        out = _fit(out[:, :num_heads, :latent_dim], num_tokens)
        return out, None if lse is None else _fit(by_head(lse, num_heads), num_tokens)

    num_decode, config = min(num_tokens, num_seqs), configured(1)
    items = plan_items(decoding, config, max(num_decode, config.window), share)
    decoded = launch(config, num_decode, items)
    if is_decode:
        out, lse = launches.of_launch(decoded, decoding)
    else:
        of_tiles = configured(tuning.queries or _tile_queries(padded_heads(num_heads), mask))
        tile_items = plan_items(others, of_tiles, max(num_tokens, of_tiles.window), share)
        out, lse = launches.with_tiles(decoded, lambda: launch(of_tiles, num_tokens, tile_items), decoding, others)
    return out.astype(q_nope.dtype), lse_with_sinks(lse, sinks)


def _compute_dtype(q_dtype: jnp.dtype, page_dtype: jnp.dtype) -> str:
    return "bfloat16" if q_dtype == jnp.bfloat16 and page_dtype.itemsize <= 2 else "float32"


def _tile_queries(heads: int, mask: MaskRule) -> int:
    """Query tokens of a tile: about 1,024 rows, from 8 to 64 tokens, no longer than a chunk."""
    queries = max(SMALLEST_TILE, min(64, 1024 // heads))
    if mask.attention_chunk_size is not None:
        queries = min(queries, mask.attention_chunk_size)
    return 1 << (queries.bit_length() - 1)


def _sizes(queries: int, heads: int, seen: int, page_size: int, tuning: Tuning) -> dict[str, int]:
    """Units, slots of a block and of a part, tokens of a chunk: powers of two, as is `seen`, slots that a tile can see.

    A decode step has 2,048 slots: fewer leave the matrix unit waiting between one part's products and its softmax.
    """
    is_decode = queries == 1
    block = tuning.decode_block if is_decode else tuning.tile_block
    if block is None:
        block = max(LANES, page_size, min(1024 if is_decode else 512, seen))
    part = (tuning.decode_part or 512) if is_decode else (tuning.tile_part or 256)
    chunk = max(1, min(queries, tuning.chunk_rows // heads))
    return {
        "units": (tuning.units or min(4, 2048 // block)) if is_decode else 1,
        "block": block,
        "part": min(block, part),
        "chunk": 1 << (chunk.bit_length() - 1),
        "ahead": tuning.ahead,
        "buffers": tuning.decode_buffers if is_decode else tuning.tile_buffers,
    }


def _fit(x: jax.Array, num_tokens: int) -> jax.Array:
    """x with `num_tokens` rows."""
    return jnp.pad(x[:num_tokens], [(0, max(0, num_tokens - x.shape[0])), *[(0, 0)] * (x.ndim - 1)])


def _query_rows(q_nope: jax.Array, q_pe: jax.Array, config: LatentConfig) -> jax.Array:
    """[T, heads, lanes] in the compute dtype, at least as many tokens as a step has at hand."""
    q = jnp.concatenate([q_nope, q_pe], axis=-1).astype(config.compute_dtype)
    sizes = (max(q.shape[0], config.window), config.heads, config.lanes)
    return jnp.pad(q, [(0, size - old) for size, old in zip(sizes, q.shape, strict=True)])


def _per_row_operands(config: LatentConfig, sinks: jax.Array | None, k_scale: jax.Array | None) -> dict[str, Operand]:
    """Arrays float32[rows, 128] by name: a number for each row, in every lane."""
    arrays = {}
    if sinks is not None:
        heads = base2_sinks(sinks)
        heads = jnp.pad(heads, (0, config.heads - heads.shape[0]), constant_values=HIDDEN)
        arrays["sinks"] = jnp.broadcast_to(jnp.tile(heads, config.chunk)[:, None], (config.rows, LANES))
    if k_scale is not None:
        arrays["k_scale"] = jnp.broadcast_to(jnp.asarray(k_scale, jnp.float32), (config.rows, LANES))
    return {name: Operand(x, pl.BlockSpec(memory_space=pltpu.VMEM)) for name, x in arrays.items()}


def _launch(
    config: LatentConfig,
    work: tuple[jax.Array, jax.Array],  # of `plan_items`
    tables: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, heads, value_lanes], lse as `tpu.lse` has it) of the sequences with items in `work`, else undefined."""
    num_tokens, (items, num_items) = q.shape[0], work
    fields = items.reshape(num_fields(config), -1)
    num_steps = -(-jnp.sum(fields[Field.NUM_BLOCKS], dtype=jnp.int32) // config.units)
    scalars: dict[str, Any] = {"fields": items, "counts": jnp.stack([num_items, num_steps]).astype(jnp.int32)}
    inputs = {"q": Operand(q, IN_HBM), "pages": Operand(pages, IN_HBM)}
    if config.tables_in_hbm:
        inputs["tables"] = Operand(tables, IN_HBM)
    else:
        scalars["tables"] = tables
    out = jax.ShapeDtypeStruct((num_tokens, config.heads, config.value_lanes), q.dtype)
    outputs = {"out": Operand(out, IN_HBM)}
    if config.return_lse:
        lse = jax.ShapeDtypeStruct(lse_shape(num_tokens, config.heads), jnp.float32)
        outputs["lse"] = Operand(lse, IN_HBM)
    kind = f"q{config.queries}_h{config.heads}_u{config.units}"
    results = call(
        functools.partial(_kernel, config=config, room=fields.shape[1]),
        Refs,
        name=f"mla_{kind}_b{config.block}_p{config.page_size}_n{config.buffers}",
        grid=1,
        scalars=scalars,
        inputs={**inputs, **_per_row_operands(config, sinks, k_scale)},
        outputs=outputs,
        scratch=_scratch(config, pages),
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )
    return results["out"], results.get("lse")


def _scratch(config: LatentConfig, pages: jax.Array) -> dict[str, Any]:
    """Scratch of `Refs` by name."""
    dtype = jnp.dtype(config.compute_dtype)
    state = (config.units, config.num_chunks, config.rows)
    tile = (config.units, config.queries, config.heads)
    scratch: dict[str, Any] = {
        "buffer": pltpu.VMEM(buffer_shape(config, pages), pages.dtype),
        "arrived": pltpu.SemaphoreType.DMA((config.buffers,)),
        "q_tile": pltpu.VMEM((config.buffers, config.window, config.heads, config.lanes), dtype),
        "q_arrived": pltpu.SemaphoreType.DMA((config.buffers,)),
        "m": pltpu.VMEM((*state, LANES), jnp.float32),
        "l": pltpu.VMEM((*state, LANES), jnp.float32),
        "acc": pltpu.VMEM((*state, config.value_lanes), jnp.float32),
        "out_tile": pltpu.VMEM((*tile, config.value_lanes), dtype),
        "left": pltpu.SemaphoreType.DMA,
    }
    if config.return_lse:
        scratch["lse_tile"] = pltpu.VMEM((config.units, *lse_shape(config.queries, config.heads)), jnp.float32)
    if config.tables_in_hbm:
        scratch["row"] = pltpu.SMEM((config.num_rows * config.table_stride,), jnp.int32)
        scratch["row_arrived"] = pltpu.SemaphoreType.DMA
    return scratch


def _kernel(refs: Refs, *, config: LatentConfig, room: int) -> None:
    """All steps of a launch."""
    items = ItemTable(config, refs.fields, room, refs.tables, refs.row, refs.row_arrived, config.num_rows)
    walk = Walk(config, items, refs.counts[0], refs.q.shape[0])
    num_steps, last_slot = refs.counts[1], config.buffers - 1
    moves = _Moves(config, walk, refs, LatentBlocks(config, items, refs.pages, refs.buffer, refs.arrived))

    def trip(n: jax.Array, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        before, this, *_ = steps  # and those whose blocks are under way
        following, slot = walk.following(steps[-1]), n & last_slot
        moves.start(following, (n + last_slot) & last_slot, n + last_slot < num_steps)
        attention = StepAttention(config, walk, moves.blocks, refs, this, slot)
        moves.wait_for_queries(this)
        is_full = walk.is_full(this).astype(jnp.int32)

        def full(_: jax.Array, carry: None) -> None:
            moves.blocks.wait_full(slot)
            attention.attend(masked=False)
            return carry

        def cut(_: jax.Array, carry: None) -> None:
            moves.blocks.wait(this, slot)
            attention.attend(masked=True)
            return carry

        lax.fori_loop(0, is_full, full, None)  # loops of one trip or none, which the compiler's listing keeps apart
        lax.fori_loop(is_full, 1, cut, None)
        moves.wait_for_results(before, n > 0)
        for i, unit in enumerate(this.units):
            pl.when(walk.is_end(unit))(functools.partial(attention.finish, i))
        moves.start_results(this)
        return (*steps[1:], following)

    @pl.when(num_steps > 0)
    def _() -> None:
        steps = [walk.first()]
        moves.start_rows(steps[0])
        for n in range(last_slot):
            moves.start(steps[n], jnp.int32(n), n < num_steps)
            steps.append(walk.following(steps[n]))
        last, *_ = lax.fori_loop(0, num_steps, trip, (steps[0], *steps[:-1]))
        moves.wait_for_results(last, jnp.bool_(True))


class _Moves(NamedTuple):
    """Moves blocks, table rows and queries in and results out."""

    config: LatentConfig
    walk: Walk
    refs: Refs
    blocks: LatentBlocks

    def start(self, step: Step, slot: jax.Array, is_real: jax.Array) -> None:
        """Starts the copies of a step's queries and blocks, and of the table rows that the next step needs first."""

        @pl.when(is_real)
        def _() -> None:
            pl.when(step.is_new)(self._queries(step).start)
            if self.config.tables_in_hbm:
                for unit in step.units:
                    pl.when(unit.step == 0)(self.walk.items.fetch_row(unit.item).wait)
            self.blocks.start(step, self.walk.is_full(step), slot)
            if self.config.tables_in_hbm:
                self.start_rows(self.walk.following(step))

    def start_rows(self, step: Step) -> None:
        """Starts the copies of the table rows of items that begin in a step."""
        if self.config.tables_in_hbm:
            for unit in step.units:
                pl.when(unit.step == 0)(self.walk.items.fetch_row(unit.item).start)

    def wait_for_queries(self, step: Step) -> None:
        """Waits for them where they are new."""
        pl.when(step.is_new)(self._queries(step).wait)

    def start_results(self, step: Step) -> None:
        """Starts the copies of the own rows of items that end in a step to HBM."""
        for i, unit in enumerate(step.units):
            for copy in self._results(i, unit):
                pl.when(self.walk.is_end(unit))(copy.start)

    def wait_for_results(self, step: Step, is_real: jax.Array) -> None:
        """Waits for them."""
        for i, unit in enumerate(step.units):
            for copy in self._results(i, unit):
                pl.when(is_real & self.walk.is_end(unit))(copy.wait)

    def _queries(self, step: Step) -> Copy:
        source = self.refs.q.at[pl.ds(step.token, self.config.window)]
        return pltpu.make_async_copy(source, self.refs.q_tile.at[step.slot], self.refs.q_arrived.at[step.slot])

    def _results(self, i: int, unit: Unit) -> list[Copy]:
        items = self.walk.items
        skip, count = items.field(Field.SKIP, unit.item), items.field(Field.NUM_QUERIES, unit.item)
        token = items.field(Field.TOKEN, unit.item) + skip
        pairs = [(self.refs.out_tile, self.refs.out)]
        if self.config.return_lse:
            pairs.append((self.refs.lse_tile, self.refs.lse))
        return [
            pltpu.make_async_copy(tile.at[i, pl.ds(skip, count)], target.at[pl.ds(token, count)], self.refs.left)
            for tile, target in pairs
        ]

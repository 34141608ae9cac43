"""ragged_paged_attention for TPU, in Pallas: one kernel source, launched for decode and for tiles of several queries.

Flow:    api -> [kernel_tpu] -> (out, lse)
Source:  the split by `distribution` and the packed pages follow ragged paged attention v3 (vllm-project/tpu-inference)

Grid: decode, a step for every eight items of the launch's table (`tpu_plan`); tiles, one step for all of them. An item
reads

    its queries      decode: by the grid's pipeline; tiles: one DMA, the next item's under way meanwhile
    its KV blocks    one DMA a page into a ring of buffers, those of the next blocks of all items under way
                     meanwhile (`tpu_ring`); bytes: pages seen * page_size * rows * packing * 128
    and writes       its own rows of the output

New KV, if the call brings some, is written by the first step of the decode launch. Meanwhile the ring is filled, up to
the first block that has a page that is written: no such page is read before it is complete, which is right for requests
that share pages written in the same step, too. Where tokens share rows of words, or where there are many, `kv_write`
writes before.

Blocks that every row sees whole run first, in a loop without any mask; then those that cut the interval. KV is read
from the page of the first visible key on, never from position 0. Flops: 4 * queries * Hq * D per key.
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
from pallas_kernels.checks import page_tokens
from pallas_kernels.key_share import KeyShare
from pallas_kernels.kv_write import reference as kv_rows
from pallas_kernels.kv_write.kernel_tpu import copy_rows, kv_write, write_runs, written_pages
from pallas_kernels.layouts import KV_CACHE_DTYPES, lane_pieces, tokens_per_row
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import tpu_rows, tpu_tiles
from pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks, buffer_shape
from pallas_kernels.ragged_paged_attention.tpu_plan import TpuConfig, block_slots, ring_buffers
from pallas_kernels.ragged_paged_attention.tpu_refs import Refs, TileRefs
from pallas_kernels.ragged_paged_attention.tpu_ring import BlockRing, Cursor
from pallas_kernels.ragged_paged_attention.tpu_softmax import BlockAttention, head_trips
from pallas_kernels.ragged_paged_attention.tpu_tiles import TileAttention
from pallas_kernels.ragged_paged_attention.tpu_tuning import Tuning, tile_queries, tile_rows, tuned
from pallas_kernels.schedule import Batch
from pallas_kernels.tpu.base2 import HIDDEN
from pallas_kernels.tpu.call import IN_HBM, Operand, call
from pallas_kernels.tpu.item_plan import Field, num_fields, plan_items
from pallas_kernels.tpu.items import ItemTable
from pallas_kernels.tpu.limits import (
    FlatTables,
    base2_sinks,
    flat_tables,
    lse_with_sinks,
    reason_of_sizes,
)
from pallas_kernels.tpu.lse import by_head, heads_to_lanes, lse_shape
from pallas_kernels.tpu.mosaic import LANES, Copy, Ref, chip_name, matrix_unit_lanes
from pallas_kernels.tpu.slab_refs import page_names, reason_of_slabs

MOST_FUSED_TOKENS = 8192  # whose KV the decode launch writes: 96 KiB of scalar memory
_PAIR_BYTES = 12 << 20  # of VMEM, for two KV blocks at most
_RING_BYTES = 20 << 20  # for all KV buffers, if they are more than two
_STEP_ITEMS = 8  # whose queries and results the grid's pipeline moves at once when decoding
_ROW_BYTES = 512 << 10  # of scalar memory, for rows of block tables in HBM
_VMEM_LIMIT_BYTES = {1: 32 << 20, 2: 64 << 20}


def reason_not_supported(
    pages: tuple[jax.Array, ...], mask: MaskRule, num_kv_heads: int, share: KeyShare | None = None
) -> str | None:
    """What of a call the kernel cannot do, in words; None if it can do it all."""
    if len(pages) != 1:
        return "TPU kernels read packed pages (kv,); make them by attention_layout(platform='tpu')"
    dtype = pages[0].dtype.name
    if dtype not in KV_CACHE_DTYPES or dtype == "float16":
        return f"TPU has no arithmetic on {dtype} pages; use bfloat16"
    return reason_of_slabs(pages[0]) or reason_of_sizes(page_tokens(pages, num_kv_heads), mask, share)


@functools.partial(
    jax.jit,
    static_argnames=(
        "mask",
        "num_kv_heads",
        "sm_scale",
        "soft_cap",
        "return_lse",
        "is_decode",
        "tuning",
        "tables_in_hbm",
    ),
)
def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],  # packed: ([pages, page_size / tokens a row, rows, packing, 128],)
    block_tables: jax.Array,  # int32[S, P]
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    mask: MaskRule,
    num_kv_heads: int,
    sm_scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    return_lse: bool,
    share: KeyShare | None = None,
    sink_tokens: jax.Array | None = None,  # int32[S] where the mask has them by sequence
    new_kv: tuple[jax.Array, jax.Array] | None = None,  # [T, Hkv, D] each
    slot_mapping: jax.Array | None = None,  # int32[T]
    is_decode: bool = False,  # token i is the query of sequence i
    tuning: Tuning | None = None,  # None: as tuned for the chip, else by the shapes
    tables_in_hbm: bool | None = None,  # None: where they exceed scalar memory
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(out [T, Hq, D] in q's dtype, lse float32[T, Hq] or None, pages written or None) as `AttentionOutput` says."""
    num_tokens, num_q_heads, head_dim = q.shape
    is_decode = is_decode or num_tokens == 1
    if is_decode:  # whatever its sequences are called
        distribution = distribution.at[0].set(distribution[2])
    decoding, others = launches.split(seq_lens, query_start_loc, distribution, mask, sink_tokens)
    tables = flat_tables(page_names(pages[0], block_tables), tables_in_hbm, num_tokens)
    group = num_q_heads // num_kv_heads
    tuning = tuning or tuned(q, pages[0], num_kv_heads, mask, block_tables.shape[1])
    common = _Common(mask, sm_scale, soft_cap, num_kv_heads, group, sinks, k_scale, v_scale, return_lse, tables, share)
    write, written = None, None
    page_size = page_tokens(pages, num_kv_heads)
    is_fused = num_tokens <= MOST_FUSED_TOKENS and page_size == pages[0].shape[1]
    if new_kv is not None and slot_mapping is not None and not is_fused:
        pages = kv_write(*new_kv, pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        written = pages[0]
    elif new_kv is not None and slot_mapping is not None:
        new_rows = kv_rows.packed_rows(*new_kv, pages[0], k_scale, v_scale)
        names = page_names(pages[0], written_pages(slot_mapping, page_size))
        write = _Write(write_runs(slot_mapping, page_size), names, new_rows)

    def configured(queries: int, q: jax.Array) -> TpuConfig:
        return _config(common, pages[0], q, block_tables.shape[1], queries, tuning)

    num_decode = min(num_tokens, seq_lens.shape[0])
    config = configured(1, q[:num_decode])
    ends = jnp.repeat(distribution[0], 3)
    every_row = Batch.of_step(seq_lens, query_start_loc, ends, sink_tokens)  # an item for each token
    work = plan_items(every_row, config, num_decode, share)
    out, lse, fused = _launch(config, work, q[:num_decode], pages[0], common, write)
    written = written if fused is None else fused
    decoded = _fit(out, num_tokens), None if lse is None else _fit(lse, num_tokens)

    def both_launches() -> launches.Result:
        of_tiles = configured(tuning.queries or tile_queries(group, mask, tile_rows(num_tokens, num_kv_heads)), q)
        work = plan_items(others, of_tiles, max(num_tokens, of_tiles.queries), share)

        def tile() -> launches.Result:
            padded = jnp.pad(q, [(0, max(0, of_tiles.queries - num_tokens)), (0, 0), (0, 0)])
            rows = pages[0] if written is None else written
            out, lse, _ = _launch(of_tiles, work, padded, rows, common, None)
            return out[:num_tokens], None if lse is None else lse[:num_tokens]

        return launches.with_tiles(decoded, tile, decoding, others)

    out, lse = launches.of_launch(decoded, decoding) if is_decode else both_launches()
    return out[..., :head_dim].astype(q.dtype), lse_with_sinks(lse, sinks), written


class _Write(NamedTuple):
    """New KV to be written before it is read."""

    runs: jax.Array  # table of `write_runs`
    pages: jax.Array  # names of those of `written_pages`
    rows: jax.Array  # [T, rows, packing, 128] as pages hold them


class _Result(NamedTuple):
    """What one launch gives."""

    out: jax.Array  # [T, Hq, lanes]
    lse: jax.Array | None  # float32[T, Hq]
    pages: jax.Array | None  # where new KV was written


class _Common(NamedTuple):
    """What both launches share."""

    mask: MaskRule
    sm_scale: float
    soft_cap: float | None
    num_kv_heads: int
    group: int
    sinks: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    return_lse: bool
    tables: FlatTables
    share: KeyShare | None


def _config(
    common: _Common, pages: jax.Array, q: jax.Array, num_columns: int, queries: int, tuning: Tuning
) -> TpuConfig:
    """Static sizes of one launch."""
    page_size, (rows, packing) = page_tokens([pages], common.num_kv_heads), pages.shape[2:4]
    tokens, lanes = tokens_per_row(common.num_kv_heads, packing), lane_pieces(q.shape[2]) * LANES
    is_short = q.dtype == jnp.bfloat16 and pages.dtype.itemsize <= 2
    token_bytes = (rows | 1) * 4 * LANES // tokens
    block, buffers = (
        (tuning.decode_block, tuning.decode_buffers) if queries == 1 else (tuning.tile_block, tuning.tile_buffers)
    )
    if block is None:
        ranks = 1 if common.share is None else common.share.size
        block = block_slots(common.mask, queries, num_columns, page_size, token_bytes, _PAIR_BYTES, ranks)
    if buffers is None:
        buffers = ring_buffers(block * token_bytes, _RING_BYTES)
    return TpuConfig(
        mask=common.mask,
        sm_scale=common.sm_scale,
        soft_cap=common.soft_cap,
        num_kv_heads=common.num_kv_heads,
        group=common.group,
        lanes=lanes,
        page_size=page_size,
        tokens_per_row=tokens,
        compute_dtype="bfloat16" if is_short else "float32",
        pushed_dtype="float32" if not is_short else pushed_dtype(pages.dtype) if queries == 1 else "bfloat16",
        queries=queries,
        block=block,
        part=min(block, 512),
        heads=2 if queries == 1 and lanes == LANES and common.num_kv_heads % 2 == 0 else 1,
        scales_queries=queries > 1 and is_short and lanes % matrix_unit_lanes() != 0,
        has_sinks=common.sinks is not None,
        has_k_scale=common.k_scale is not None,
        has_v_scale=common.v_scale is not None,
        return_lse=common.return_lse,
        table_stride=common.tables.stride,
        tables_in_hbm=common.tables.in_hbm,
        max_unrolled=tuning.max_unrolled,
        buffers=buffers,
        step_items=min(_STEP_ITEMS, q.shape[0]) if queries == 1 else None,
        context_size=None if common.share is None else common.share.size,
    )


def pushed_dtype(dtype: jnp.dtype) -> str:
    """Dtype in which bfloat16 products take keys and values out of pages of `dtype`."""
    takes_float8 = chip_name() in (None, "v7x") and dtype.name in ("float8_e4m3fn", "float8_e5m2")
    return dtype.name if takes_float8 else "bfloat16"


def _fit(x: jax.Array, num_tokens: int) -> jax.Array:
    return jnp.pad(x, [(0, num_tokens - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _per_row_operands(common: _Common, config: TpuConfig) -> dict[str, Operand]:
    """Arrays of `tpu_rows.per_row` by name."""
    arrays = {}
    if common.sinks is not None:
        arrays["sinks"] = tpu_rows.per_row(base2_sinks(common.sinks), config, fill=HIDDEN)
    for name, scale in (("k_scale", common.k_scale), ("v_scale", common.v_scale)):
        if scale is not None:
            heads = jnp.broadcast_to(jnp.asarray(scale, jnp.float32).reshape(-1), (common.num_kv_heads,))
            arrays[name] = tpu_rows.per_row(jnp.repeat(heads, common.group), config, fill=0.0)
    return {name: Operand(x, pl.BlockSpec(x.shape, lambda w, *_: (0, 0, 0))) for name, x in arrays.items()}


def _launch(
    config: TpuConfig,
    work: tuple[jax.Array, jax.Array],  # of `plan_items`
    q: jax.Array,
    pages: jax.Array,
    common: _Common,
    write: _Write | None,
) -> _Result:
    """Results of the sequences with items in `work`; the rest is undefined."""
    num_tokens, is_decode = q.shape[0], config.queries == 1
    items, count = work
    q_rows = (tpu_rows.decode_queries if is_decode else tpu_rows.tile_queries)(q, config)
    scalars: dict[str, Any] = {"items": items, "num_items": count[None]}
    inputs, scratch = {"q": _rows(q_rows, config), **_per_row_operands(common, config)}, _scratch(config, q_rows, pages)
    if write is not None:
        scalars["runs"] = write.runs
        inputs["written"] = Operand(write.pages, pl.BlockSpec(write.pages.shape, lambda w, *_: (0, 0)))
        inputs["new_rows"] = Operand(write.rows, IN_HBM)
        scratch["rows_arrived"] = pltpu.SemaphoreType.DMA
    if config.tables_in_hbm:
        inputs = {"tables": Operand(common.tables.entries, IN_HBM), **inputs}
    else:
        scalars["tables"] = common.tables.entries
    if write is None:
        inputs["pages"] = Operand(pages, IN_HBM)
    out_shape = (*q_rows.shape[:3], config.lanes) if is_decode else q_rows.shape
    outputs = {"out": _rows(jax.ShapeDtypeStruct(out_shape, q_rows.dtype), config)}
    if config.return_lse:
        shape = lse_shape(num_tokens, tpu_rows.lse_rows(config))
        outputs["lse"] = _rows(jax.ShapeDtypeStruct(shape, jnp.float32), config)
    results = call(
        functools.partial(_kernel, config=config, writes=write is not None),
        Refs,
        name=f"rpa_q{config.queries}_b{config.block}_p{config.page_size}_t{head_trips(config, pages.dtype)}"
        f"_n{config.buffers}",
        # The first step runs even where there is nothing to attend: it writes.
        grid=1 if config.step_items is None else jnp.maximum(pl.cdiv(count, config.step_items), 1),
        scalars=scalars,
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        in_place={} if write is None else {"pages": pages},
        vmem_limit_bytes=_VMEM_LIMIT_BYTES[1 if is_decode else 2],
    )
    return _Result(*_per_head(config, results["out"], results.get("lse")), results.get("pages"))


def _per_head(config: TpuConfig, out: jax.Array, lse: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, Hq, lanes], lse [T, Hq]) from the arrays that a launch wrote."""
    if lse is not None:
        lse = by_head(lse, tpu_rows.lse_rows(config))
    if config.queries == 1:
        if lse is not None:
            lse = tpu_rows.decode_results(lse.reshape(*out.shape[:3], 1), config)[..., 0]
        return tpu_rows.decode_results(out, config), lse
    if lse is not None:
        heads = lse.reshape(lse.shape[0], config.num_kv_heads, config.padded_group)
        lse = heads[..., : config.group].reshape(lse.shape[0], -1)
    return tpu_rows.tile_results(out, config), lse


def _rows(value: Any, config: TpuConfig) -> Operand:
    """Decode: tokens of the step's items, whose numbers are theirs. Tiles: in HBM, moved by the kernel."""
    if config.step_items is None:
        return Operand(value, IN_HBM)
    zeros = (0,) * (len(value.shape) - 1)
    return Operand(value, pl.BlockSpec((config.step_items, *value.shape[1:]), lambda w, *_: (w, *zeros)))


def _scratch(config: TpuConfig, q_rows: jax.Array, pages: jax.Array) -> dict[str, Any]:
    """Scratch of `Refs` by name."""
    scratch: dict[str, Any] = {
        "buffer": pltpu.VMEM(buffer_shape(config, pages), pages.dtype),
        "arrived": pltpu.SemaphoreType.DMA((config.buffers,)),
        "cursor": pltpu.SMEM((len(Cursor),), jnp.int32),
    }
    if config.tables_in_hbm:
        num_rows = max(2, min(config.buffers + 1, _ROW_BYTES // (4 * config.table_stride)))
        scratch["row"] = pltpu.SMEM((num_rows * config.table_stride,), jnp.int32)
        scratch["row_arrived"] = pltpu.SemaphoreType.DMA((num_rows,))
    if config.queries > 1:
        return scratch | tpu_tiles.state_shapes(config) | {"tile": tpu_tiles.scratch_shapes(config, q_rows)}
    shape = (config.num_products, config.rows)
    return scratch | {
        "m": pltpu.VMEM((*shape, LANES), jnp.float32),
        "l": pltpu.VMEM((*shape, LANES), jnp.float32),
        "acc": pltpu.VMEM((*shape, config.columns), jnp.float32),
        "tile": None,
    }


def _kernel(refs: Refs, *, config: TpuConfig, writes: bool) -> None:
    """The items of one step of the grid."""
    rows: tuple[Any, ...] = ()
    if config.tables_in_hbm:
        rows = (refs.row, refs.row_arrived, refs.row_arrived.shape[0])
    items = ItemTable(config, refs.items, refs.items.shape[0] // num_fields(config), refs.tables, *rows)
    kv = KVBlocks(config, items, refs.pages, refs.buffer, refs.arrived)
    ring = BlockRing(config, kv, refs.cursor)
    tiles = None if refs.tile is None else _QueryTiles(config, kv, refs, refs.tile)
    num_items = refs.num_items[0]

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        ring.rewind()
        if writes:
            write = functools.partial(copy_rows, refs.runs, refs.new_rows, refs.pages, refs.rows_arrived)
            ring.fill(write(meanwhile=lambda: ring.fill_before(refs.written)))
        else:
            ring.fill()
        if tiles is not None:
            pl.when(num_items > 0)(lambda: tiles.fetch(jnp.int32(0)).start())

    if config.step_items is None:
        first, end = jnp.int32(0), num_items
    else:
        first = pl.program_id(0) * config.step_items
        end = jnp.minimum(first + config.step_items, num_items)

    def attend(item: jax.Array, carry: None) -> None:
        if tiles is None:
            _decode_item(ring, BlockAttention(config, kv, refs, item, item - first), refs)
        else:
            _tile_item(ring, TileAttention(config, kv, refs, tiles.tile, item), tiles, num_items)
        return carry

    lax.fori_loop(first, end, attend, None)


def _decode_item(ring: BlockRing, attention: BlockAttention, refs: Refs) -> None:
    """An item of one query token, whose queries and results the grid's pipeline moves."""
    attention.reset()
    _attend_blocks(ring, attention)
    for i, out in attention.finish():
        refs.out[attention.place, i] = out.astype(refs.out.dtype)
    if ring.config.return_lse:
        refs.lse[pl.ds(attention.place, 1)] = heads_to_lanes(refs.m[...].reshape(1, -1, LANES))


def _tile_item(ring: BlockRing, attention: TileAttention, tiles: _QueryTiles, num_items: jax.Array) -> None:
    """An item of several query tokens."""
    config, item, tile = ring.config, attention.item, attention.tile
    tiles.fetch(item).wait()
    attention.load_queries()
    pl.when(item + 1 < num_items)(lambda: tiles.fetch(item + 1).start())
    attention.reset()
    _attend_blocks(ring, attention)
    pl.when(item > 0)(lambda: tiles.wait_for_results(item - 1))
    for i, out in attention.finish():
        tpu_rows.pack_head(out, i, tile.out, config)
    if config.return_lse:
        tpu_rows.pack_lse(tile.lse_rows, tile.lse, config)
    tiles.start_results(item)
    pl.when(item + 1 == num_items)(lambda: tiles.wait_for_results(item))


def _attend_blocks(ring: BlockRing, attention: BlockAttention | TileAttention) -> None:
    """All blocks of an item, each of which leaves its buffer to the block `buffers` later.

    Three loops: full blocks while the block that is started is a full one of the item, too; the other full blocks; and
    those that need a mask.
    """
    config, kv, items, item = ring.config, ring.kv, ring.items, attention.item
    num_blocks, num_full = items.field(Field.NUM_BLOCKS, item), items.field(Field.NUM_FULL, item)
    num_inside = jnp.maximum(num_full - config.buffers, 0)
    number_0, entry_0 = items.field(Field.STEP, item), ring.full_entries(item)

    def inside(step: jax.Array, carry: None) -> None:
        slot = ring.slot(number_0 + step)
        kv.wait(config.block_pages, slot)
        attention.attend(slot, None, None)
        kv.start_full(entry_0 + (step + config.buffers) * config.block_pages, slot)
        return carry

    def full(step: jax.Array, carry: None) -> None:
        slot = ring.slot(number_0 + step)
        kv.wait(config.block_pages, slot)
        attention.attend(slot, None, None)
        ring.start_next(slot)
        return carry

    def cut(step: jax.Array, carry: None) -> None:
        slot = ring.slot(number_0 + step)
        block, num_pages = items.block(item, step)
        kv.wait(num_pages, slot)
        attention.attend(slot, block, num_pages * config.page_size)
        ring.start_next(slot)
        return carry

    lax.fori_loop(0, num_inside, inside, None)
    ring.skip(num_inside)
    lax.fori_loop(num_inside, num_full, full, None)
    lax.fori_loop(num_full, num_blocks, cut, None)


class _QueryTiles(NamedTuple):
    """Moves tiles of several queries in and their results out."""

    config: TpuConfig
    kv: KVBlocks
    refs: Refs
    tile: TileRefs

    def fetch(self, item: jax.Array) -> Copy:
        """The copy of an item's queries into VMEM."""
        token = self.kv.items.field(Field.TOKEN, item)
        source = self.refs.q.at[pl.ds(token, self.config.queries)]
        return pltpu.make_async_copy(source, self.tile.q, self.tile.q_arrived)

    def start_results(self, item: jax.Array) -> None:
        """Starts the copies of an item's own rows to HBM."""
        for copy in self._results(item):
            copy.start()

    def wait_for_results(self, item: jax.Array) -> None:
        """Waits for them."""
        for copy in self._results(item):
            copy.wait()

    def _results(self, item: jax.Array) -> list[Copy]:
        skip, count = self.kv.items.field(Field.SKIP, item), self.kv.items.field(Field.NUM_QUERIES, item)
        token = self.kv.items.field(Field.TOKEN, item) + skip
        pairs: list[tuple[Ref, Ref]] = [(self.tile.out, self.refs.out)]
        if self.config.return_lse:
            pairs.append((self.tile.lse, self.refs.lse))
        return [
            pltpu.make_async_copy(results.at[pl.ds(skip, count)], target.at[pl.ds(token, count)], self.tile.left)
            for results, target in pairs
        ]

"""References of the TPU kernel: what a launch is given, by name.

Flow:    operands of a launch -> `tpu.call` -> [Refs] -> kernel_tpu, tpu_softmax, tpu_tiles
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.tpu.mosaic import Ref


class TileRefs(NamedTuple):
    """Scratch of a launch of tiles: of one tile."""

    rows: Ref  # [rows, lanes] queries of a head
    columns: Ref  # [Hkv, depth, rows] queries, rows in lanes
    scores: Ref  # float32[buffers, part, rows]
    lse_rows: Ref  # float32[Hkv, rows, 128], None without LSE like `lse`
    q: Ref  # [queries, ...] as `tpu_rows.tile_queries` has them
    q_arrived: Ref  # DMA semaphore
    out: Ref  # as q
    lse: Ref  # float32[queries, n, 128] as `tpu.lse` has it
    left: Ref  # DMA semaphore


class Refs(NamedTuple):
    """References of a step of the grid."""

    items: Ref  # SMEM int32[fields * room] of `item_plan`
    num_items: Ref  # SMEM int32[1]
    tables: Ref  # int32[S * table_stride], SMEM or HBM
    q: Ref  # decode: those of the step's items; tiles: HBM
    pages: Ref  # HBM [pages, page_size / tokens a row, rows, packing, 128]
    out: Ref  # as q
    buffer: Ref  # `tpu_pages.buffer_shape`
    arrived: Ref  # DMA semaphores, one a buffer
    cursor: Ref  # SMEM int32[fields of `Cursor`]
    m: Ref  # float32: the state of an item's softmax, see `tpu_softmax` and `tpu_tiles`
    l: Ref  # noqa: E741
    acc: Ref
    tile: TileRefs | None  # None: it decodes
    runs: Ref = None  # SMEM int32[3 * T + 1] of `write_runs`; with the next three where the launch writes new KV
    written: Ref = None  # int32[n, 128] of `written_pages`
    new_rows: Ref = None  # HBM [T, rows, packing, 128]
    rows_arrived: Ref = None  # DMA semaphore
    sinks: Ref = None  # base-2 logits as `tpu_rows.per_row`, like the next two
    k_scale: Ref = None
    v_scale: Ref = None
    lse: Ref = None  # float32[T, n, 128] as `tpu.lse` has it, cut like q
    row: Ref = None  # SMEM int32[rows * table_stride], for tables in HBM
    row_arrived: Ref = None  # DMA semaphores, one a row

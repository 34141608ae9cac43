"""References of the TPU kernel of latent attention: what a launch is given, by name.

Flow:    operands of a launch -> `tpu.call` -> [Refs] -> kernel_tpu, tpu_attention
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.tpu.mosaic import Ref


class Refs(NamedTuple):
    """References of a launch."""

    fields: Ref  # SMEM int32[fields * room] of `item_plan`
    counts: Ref  # SMEM int32[2] items, steps
    tables: Ref  # int32[S * table_stride], SMEM or HBM
    q: Ref  # HBM [T, heads, lanes]
    pages: Ref  # HBM [pages, rows, pieces, packing, 128]
    out: Ref  # HBM [T, heads, value_lanes]
    buffer: Ref  # `tpu_latents.buffer_shape`
    arrived: Ref  # DMA semaphores, one a buffer
    q_tile: Ref  # [buffers, window, heads, lanes]
    q_arrived: Ref  # DMA semaphores, one a tile
    m: Ref  # float32[units, chunks, rows, 128]
    l: Ref  # noqa: E741  float32[units, chunks, rows, 128]
    acc: Ref  # float32[units, chunks, rows, value_lanes]
    out_tile: Ref  # [units, queries, heads, value_lanes]
    left: Ref  # DMA semaphore
    sinks: Ref = None  # float32[rows, 128] in base 2; of this shape is the next one
    k_scale: Ref = None
    lse: Ref = None  # HBM float32[T, n, 128] as `tpu.lse` has it
    lse_tile: Ref = None  # float32[units, queries, n, 128]
    row: Ref = None  # SMEM int32[num_rows * table_stride], for tables in HBM
    row_arrived: Ref = None  # DMA semaphore

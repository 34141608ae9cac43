"""ragged_paged_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    lengths of the step -> [plan] -> GpuSchedule;  the op's arguments + GpuSchedule -> [ragged_paged_attention]
         -> decode_pieces, prefill_tiles, merge_pieces

Two launches share a step: sequences that decode, of one query each or, in steps with drafts, of a few, and tiles of all
others. Either finds no work in a step that has none, and a step that is planned as one in which all decode has no
second. The merge of what decoded puts its results between those of the tiles. All that depends on the step's lengths is
in the plan, so a layer is these launches, and one that brings the queries that decode in the shape of tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.merge import merge_pieces
from pallas_kernels.gpu.places import PageView, reason_of_places
from pallas_kernels.gpu.plan import (
    MIN_GROUP_ROWS,
    MIN_STAGES,
    GpuConfig,
    block_slots,
    compute_dtype,
    kv_bytes,
    most_stages,
    reason_of_pages,
    to_compute_dtype,
)
from pallas_kernels.gpu.softmax import as_scales, as_sinks, score_factor
from pallas_kernels.gpu.tiles import TileField, TileShape
from pallas_kernels.mask import MaskRule
from pallas_kernels.planned_sizes import check_planned
from pallas_kernels.ragged_paged_attention import gpu_decode, gpu_prefill
from pallas_kernels.ragged_paged_attention.gpu_schedule import GpuSchedule, PlanSizes, most_queries
from pallas_kernels.ragged_paged_attention.tuning import OP, TunedShape, sizes_for


class Tuning(NamedTuple):
    """Sizes that change speed, not results; None: chosen by shape."""

    decode_block: int | None = None  # slots of a KV block
    decode_stages: int | None = None
    num_blocks: int | None = None  # thread blocks that share the work of decoding; None: one a multiprocessor
    prefill_block: int | None = None
    prefill_stages: int | None = None
    prefill_warpgroups: int | None = None  # 3: one fetches, 2: the first of those that attend does
    prefill_blocks: int | None = None  # thread blocks that go over all tiles of prefill; None: one for each tile


def tuned(q: jax.Array, pages: tuple[jax.Array, ...], num_kv_heads: int, mask: MaskRule) -> Tuning:
    """Sizes of the card's file for these shapes, whose values are as wide as the keys; the rest by the shapes.

    Raises:
        ValueError: the card's file is broken.
    """
    if pages[0].shape[-1] != pages[1].shape[-1]:
        return Tuning()
    shape = TunedShape.of(q, pages[0], num_kv_heads, mask)
    return Tuning(**sizes_for(mosaic.card_name(), shape, Tuning._fields))


def reason_not_supported(q: jax.Array, pages: tuple[jax.Array, ...], num_kv_heads: int) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    if len(pages) != 2:
        return "GPU kernels read split K and V pages, got packed ones"
    reason = reason_of_pages(q.dtype, pages[0].dtype, pages[0].shape[1])
    if reason is not None:
        return reason
    head_dim, head_dim_v = (p.shape[-1] for p in pages)
    unit = 32 if pages[0].dtype.itemsize == 1 else 16
    if any(not 64 <= dim <= 256 or dim % unit for dim in (head_dim, head_dim_v)):
        return f"GPU kernels take head dimensions from 64 to 256 in steps of {unit}, got {head_dim} and {head_dim_v}"
    if q.shape[1] > num_kv_heads * mosaic.ROWS:
        return f"GPU kernels take at most {mosaic.ROWS} query heads per KV head, got {q.shape[1] // num_kv_heads}"
    of_places = (reason_of_places(array, 2, MIN_GROUP_ROWS) for array in pages)
    return next(filter(None, of_places), None) or mosaic.reason_without_hopper()


def plan(
    q: Any,  # [T, Hq, D]; of it and of the pages shapes and dtypes alone
    pages: tuple[Any, ...],
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    mask: MaskRule,
    num_kv_heads: int,
    is_decode: bool,  # every sequence has at most T / S queries
    sink_tokens: jax.Array | None = None,  # int32[S] where the mask has them by sequence
    tuning: Tuning | None = None,
) -> GpuSchedule:
    """The schedule of a step for all layers with these shapes and this mask."""
    tuning = tuning or tuned(q, pages, num_kv_heads, mask)
    config = _config(q, pages, mask, 1.0, None)
    sizes = _sizes(config, tuning, q.shape[0], seq_lens.shape[0])
    is_few = q.shape[0] <= sizes.queries * seq_lens.shape[0]  # else a tile has no room for so many
    sizes = sizes._replace(is_decode=is_decode and is_few)
    return GpuSchedule.of(seq_lens, query_start_loc, distribution, config, sizes, sink_tokens)


def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    *,
    mask: MaskRule,
    num_kv_heads: int,
    sm_scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    return_lse: bool,
    sink_tokens: jax.Array | None = None,  # int32[S] where the mask has them by sequence
    schedule: Any = None,  # of `plan`; None: it is made here
    tuning: Tuning | None = None,  # None: as tuned for the card, else by the shapes
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, Hq, Dv] in q's dtype, lse float32[T, Hq] or None) as `AttentionOutput` says.

    Raises:
        ValueError: `schedule` is none, or was planned for other shapes, pages or another mask.
    """
    tuning = tuning or tuned(q, pages, num_kv_heads, mask)
    config = _config(q, pages, mask, sm_scale, soft_cap)
    sizes = _sizes(config, tuning, q.shape[0], seq_lens.shape[0])
    if schedule is None:
        planned = GpuSchedule.of(seq_lens, query_start_loc, distribution, config, sizes, sink_tokens)
    else:
        planned = check_planned(OP, schedule, GpuSchedule, sizes)
    layer = _Layer(
        pages=(PageView.of(pages[0], 2), PageView.of(pages[1], 2)),
        block_tables=block_tables,
        k_scale=as_scales(k_scale),
        v_scale=as_scales(v_scale),
        sinks=as_sinks(sinks),
        config=config,
        tuning=tuning,
    )
    own = q if planned.tokens is None else q[jnp.maximum(planned.tokens, 0)]
    if planned.tokens is None or planned.tiles is None:
        return _decode(layer, own, planned, q.dtype, into=None)
    tiled, row_lse = _prefill(layer, q, planned.tiles)
    out, lse = _decode(layer, own, planned, q.dtype, into=(planned.tokens, tiled))
    num_tokens = q.shape[0]
    if not return_lse:
        return out[:num_tokens], None
    of_tiles = _lse_by_token(row_lse, planned.tiles, sizes.tile, num_tokens)
    place = jnp.where(planned.tokens < 0, num_tokens, planned.tokens)
    return out[:num_tokens], of_tiles.at[place].set(lse, mode="drop")


class _Layer(NamedTuple):
    """What decoding and prefill share."""

    pages: tuple[PageView, PageView]  # entries [Hkv, D] and [Hkv, Dv]
    block_tables: jax.Array  # int32[S, P]
    k_scale: jax.Array  # float32[1 or Hkv]
    v_scale: jax.Array  # float32[1 or Hkv]
    sinks: jax.Array  # float32[1 or Hq], -inf: none
    config: GpuConfig  # but for the sizes of the ring
    tuning: Tuning

    def ring_config(self, fixed_bytes: int, block: int, stages: int | None) -> GpuConfig:
        """`config` with as many stages of KV blocks as shared memory holds beside `fixed_bytes`."""
        config = replace(self.config, block=block)
        stage, converted = kv_bytes(config)
        fitting = most_stages(mosaic.SMEM_BYTES - fixed_bytes - converted, stage)
        return replace(config, stages=stages or max(MIN_STAGES, fitting))


def _config(q: Any, pages: tuple[Any, ...], mask: MaskRule, sm_scale: float, soft_cap: float | None) -> GpuConfig:
    """The config of a call, without the sizes of the ring."""
    dtype, page_dtype = jnp.dtype(q.dtype).name, jnp.dtype(pages[0].dtype).name
    page_size, num_kv_heads, head_dim = pages[0].shape[1:]
    return GpuConfig(
        mask=mask,
        soft_cap=soft_cap,
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        head_dim=head_dim,
        head_dim_v=pages[1].shape[-1],
        page_size=page_size,
        page_dtype=page_dtype,
        compute_dtype=compute_dtype(dtype, page_dtype),
        block=block_slots(head_dim, pages[1].shape[-1]),
        stages=MIN_STAGES,
        score_factor=score_factor(sm_scale, soft_cap),
    )


def _sizes(config: GpuConfig, tuning: Tuning, num_tokens: int, num_seqs: int) -> PlanSizes:
    """What the plan of a call depends on; of a step in which not all decode."""
    return PlanSizes(
        mask=config.mask,
        page_size=config.page_size,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        units=config.num_kv_heads,
        queries=most_queries(num_tokens, num_seqs, config.group),
        decode_block=tuning.decode_block or config.block,
        num_blocks=tuning.num_blocks or mosaic.num_sms(),
        tile=TileShape.of(config.group),
        tile_block=tuning.prefill_block or _split(config, tuning).block,
        is_decode=False,
    )


def _split(config: GpuConfig, tuning: Tuning) -> gpu_prefill.Split:
    """How thread blocks of prefill are split, as tuned or by the sizes."""
    given = tuning.prefill_warpgroups
    apart = None if given is None else given > gpu_prefill.WARPGROUPS
    split = gpu_prefill.Split.of(config.head_dim, config.head_dim_v, config.page_size, apart)
    return split._replace(num_blocks=tuning.prefill_blocks if split.fetches_apart else None)


def _decode(
    layer: _Layer,
    q: jax.Array,  # [S * queries, Hq, D] by slot
    planned: GpuSchedule,
    dtype: Any,  # of the results
    into: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """(out [S * queries or T, Hq, Dv], lse float32[S * queries or T, Hq]) as `merge_pieces`: by slot, or by token."""
    fixed = gpu_decode.fixed_bytes(layer.config.head_dim, layer.config.head_dim_v)
    config = layer.ring_config(fixed, planned.sizes.decode_block, layer.tuning.decode_stages)
    config = replace(config, queries=planned.sizes.queries)
    rows = to_compute_dtype(q, config)
    step = (layer.block_tables, planned.decode)
    pieces = gpu_decode.decode_pieces(rows, layer.pages, *step, layer.k_scale, config)
    arguments = (pieces, planned.decode.units, layer.sinks, layer.v_scale, config.head_dim_v, dtype)
    heads = (config.num_kv_heads, q.shape[1])
    return merge_pieces(*arguments, heads=heads, queries=config.queries, slots=planned.slots, into=into)


def _prefill(layer: _Layer, q: jax.Array, tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out [T or the tokens of a tile, Hq, Dv], LSE of rows of tiles); of tokens of no tile undefined."""
    fixed = gpu_prefill.fixed_bytes(layer.config.head_dim, layer.config.head_dim_v)
    split = _split(layer.config, layer.tuning)
    config = layer.ring_config(fixed, layer.tuning.prefill_block or split.block, layer.tuning.prefill_stages)
    least = TileShape.of(config.group).tokens
    if q.shape[0] < least:
        q = jnp.pad(q, [(0, least - q.shape[0]), (0, 0), (0, 0)])
    arguments = (q, layer.pages, layer.block_tables, tiles, layer.k_scale, layer.sinks, layer.v_scale, config)
    return gpu_prefill.prefill_tiles(*arguments, split)


def _lse_by_token(row_lse: jax.Array, tiles: jax.Array, shape: TileShape, num_tokens: int) -> jax.Array:
    """float32[T, Hq] of the tokens of tiles; of others any."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    has_queries = tiles[:, TileField.NUM_QUERIES] > 0
    first = jnp.where(has_queries, tiles[:, TileField.TOKEN] + tiles[:, TileField.SKIP], num_tokens)
    tile = jnp.maximum(jnp.sum(first[None] <= token[:, None], axis=1) - 1, 0)
    by_head = row_lse[..., : shape.heads * shape.tokens].reshape(*row_lse.shape[:2], shape.heads, shape.tokens)
    place = jnp.clip(token - tiles[tile, TileField.TOKEN], 0, shape.tokens - 1)
    return by_head[tile, :, :, place].reshape(num_tokens, -1)

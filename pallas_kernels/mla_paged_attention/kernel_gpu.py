"""mla_paged_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    lengths of the step -> [plan] -> LatentSchedule
         the op's arguments + LatentSchedule -> [mla_paged_attention] -> query tiles -> attend_pieces -> merge_pieces

The 64 rows of a tile are tokens by heads: all heads, or the largest part of them that fits. One launch has all of a
step: pieces of the sequences that decode, whose keys are split over the card, and tiles of all others. A layer is that
launch, one that packs the queries before it, one that sorts what tiles made by token and the merge of what decoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import launches
from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.merge import merge_pieces
from pallas_kernels.gpu.places import PageView, reason_of_places
from pallas_kernels.gpu.plan import (
    MIN_GROUP_ROWS,
    MIN_STAGES,
    GpuConfig,
    compute_dtype,
    most_stages,
    reason_of_pages,
    to_compute_dtype,
)
from pallas_kernels.gpu.softmax import as_scales, as_sinks, score_factor
from pallas_kernels.gpu.tiles import TileShape, padded_rows, tile_shape
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.mask import MaskRule
from pallas_kernels.mla_paged_attention.gpu_attend import attend_pieces, fixed_bytes
from pallas_kernels.mla_paged_attention.gpu_schedule import LatentSchedule, LatentSizes, OtherTokens, most_queries
from pallas_kernels.mla_paged_attention.validate import OP
from pallas_kernels.planned_sizes import check_planned

_MOST_LATENT, _MOST_DIM = 512, 576


class Tuning(NamedTuple):
    """Sizes that change speed, not results."""

    stages: int | None = None  # of blocks in shared memory; None: as many as fit
    num_blocks: int | None = None  # thread blocks that share the work of decoding; None: one a multiprocessor


def reason_not_supported(q_nope: jax.Array, q_pe: jax.Array, latent: LatentPages) -> str | None:
    """What of a call the kernels cannot do, in words; None if they can do it all."""
    if latent.array.ndim != 3:
        return "GPU kernels read latent pages [pages, page_size, dim], got packed ones"
    reason = reason_of_pages(q_nope.dtype, latent.array.dtype, latent.page_size)
    if reason is not None:
        return reason
    latent_dim, dim = q_nope.shape[-1], q_nope.shape[-1] + q_pe.shape[-1]
    if latent_dim % 128 or dim % 64 or dim == latent_dim or latent_dim > _MOST_LATENT or dim > _MOST_DIM:
        return (
            f"GPU kernels take latents of up to {_MOST_LATENT} numbers in steps of 128 and up to {_MOST_DIM} with the "
            f"rotated key in steps of 64, got {latent_dim} and {dim}"
        )
    return reason_of_places(latent.array, 1, MIN_GROUP_ROWS) or mosaic.reason_without_hopper()


def plan(
    q_nope: Any,  # [T, Hq, Dl]; of it and of the others shapes and dtypes alone
    q_pe: Any,  # [T, Hq, Dr]
    latent_pages: Any,
    seq_lens: jax.Array,  # int32[S]
    query_start_loc: jax.Array,  # int32[S + 1]
    distribution: jax.Array,  # int32[3]
    *,
    mask: MaskRule,
    page_size: int,
    is_decode: bool,  # every sequence has at most T / S queries
    tuning: Tuning = Tuning(),  # noqa: B008
) -> LatentSchedule:
    """The schedule of a step for all layers with these shapes and this mask."""
    config = _config(q_nope, q_pe, latent_pages, mask, 1.0, None, page_size)
    num_tokens, num_seqs = q_nope.shape[0], seq_lens.shape[0]
    sizes = _sizes(config, tuning, num_tokens, num_seqs)
    sizes = sizes._replace(is_decode=is_decode and num_tokens <= sizes.queries * num_seqs)
    return LatentSchedule.of(seq_lens, query_start_loc, distribution, config, sizes)


def mla_paged_attention(
    q_nope: jax.Array,  # [T, Hq, Dl]
    q_pe: jax.Array,  # [T, Hq, Dr]
    pages: tuple[jax.Array, ...],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    *,
    mask: MaskRule,
    sm_scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    page_size: int,
    schedule: Any = None,  # of `plan`; None: it is made here
    tuning: Tuning = Tuning(),  # noqa: B008
) -> launches.Result:
    """(out [T, Hq, Dl] in the queries' dtype, lse float32[T, Hq]) as `AttentionOutput` says.

    Raises:
        ValueError: `schedule` is none, or was planned for other shapes, pages or another mask.
    """
    config = _config(q_nope, q_pe, pages[0], mask, sm_scale, soft_cap, page_size)
    config = replace(config, stages=tuning.stages or _stages(config))
    sizes = _sizes(config, tuning, q_nope.shape[0], seq_lens.shape[0])
    if schedule is None:
        work = LatentSchedule.of(seq_lens, query_start_loc, distribution, config, sizes)
    else:
        work = check_planned(OP, schedule, LatentSchedule, sizes)
    num_tokens, num_heads, _ = q_nope.shape
    q = to_compute_dtype(jnp.concatenate([q_nope, q_pe], axis=-1), config)
    if work.queries is None:
        tiles = padded_rows(q.reshape(-1, config.group, config.head_dim))
    else:
        own = q[work.queries.tokens].reshape(-1, sizes.tile.tokens, sizes.parts, config.group, config.head_dim)
        tiles = padded_rows(own.swapaxes(1, 2).reshape(-1, sizes.tile.tokens * config.group, config.head_dim))
    scale, of_heads = as_scales(k_scale), as_sinks(sinks)
    out, lse, of_tiles = attend_pieces(
        tiles, PageView.of(pages[0], 1), block_tables, work, scale, of_heads, config, q_nope.dtype
    )
    merged = ((out, lse), work.units, of_heads, scale, config.head_dim_v, q_nope.dtype)
    heads = (sizes.parts, num_heads)
    if work.queries is None:
        return merge_pieces(*merged, heads=heads)
    others = work.queries.others
    if others is None or of_tiles is None:
        return merge_pieces(*merged, heads=heads, queries=sizes.tile_slots, slots=work.queries.slots)
    tiled, tiled_lse = _by_token(of_tiles, lse[work.num_split :], others, sizes, scale)
    out, lse = merge_pieces(*merged, heads=heads, queries=sizes.tile_slots, into=(others.decoded, tiled))
    place = jnp.where(others.decoded < 0, num_tokens, others.decoded)
    return out, tiled_lse.at[place].set(lse, mode="drop")


def _config(
    q_nope: Any, q_pe: Any, latent_pages: Any, mask: MaskRule, sm_scale: float, soft_cap: float | None, page_size: int
) -> GpuConfig:
    """The config of a call, with the least stages."""
    num_heads, latent_dim = q_nope.shape[1:]
    page_dtype, heads = jnp.dtype(latent_pages.dtype).name, tile_shape(num_heads).heads
    return GpuConfig(
        mask=mask,
        soft_cap=soft_cap,
        num_kv_heads=num_heads // heads,  # tiles of the same tokens
        group=heads,
        head_dim=latent_dim + q_pe.shape[-1],
        head_dim_v=latent_dim,
        page_size=page_size,
        page_dtype=page_dtype,
        compute_dtype=compute_dtype(jnp.dtype(q_nope.dtype).name, page_dtype),
        block=mosaic.ROWS,
        stages=MIN_STAGES,
        score_factor=score_factor(sm_scale, soft_cap),
    )


def _sizes(config: GpuConfig, tuning: Tuning, num_tokens: int, num_seqs: int) -> LatentSizes:
    """What the plan of a call depends on; of a step in which not all decode."""
    tile, parts = TileShape(mosaic.ROWS // config.group, config.group), config.num_kv_heads
    return LatentSizes(
        mask=config.mask,
        page_size=config.page_size,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        parts=parts,
        tile=tile,
        queries=most_queries(num_tokens, num_seqs, tile, parts),
        num_blocks=tuning.num_blocks or mosaic.num_sms(),
        is_decode=False,
    )


def _stages(config: GpuConfig) -> int:
    """Blocks of latents that fit in shared memory."""
    elements = config.block * config.head_dim
    converted = 2 * elements if config.is_converted else 0
    free = mosaic.SMEM_BYTES - fixed_bytes(config.head_dim) - converted
    return max(MIN_STAGES, most_stages(free, elements * jnp.dtype(config.page_dtype).itemsize))


def _by_token(
    out: jax.Array,  # [tiles * parts, 64, Dl]
    lse: jax.Array,  # float32[tiles * parts, 64]
    others: OtherTokens,
    sizes: LatentSizes,
    scale: jax.Array,  # float32[1]
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dl], lse float32[T, Hq]) of the tokens of tiles; 0 and -inf of all others."""
    tokens, heads = sizes.tile

    def rows(x: jax.Array) -> jax.Array:
        by_tile = x[:, : tokens * heads].reshape(-1, sizes.parts, tokens, heads, *x.shape[2:])
        return by_tile[others.tile, :, others.place].reshape(sizes.num_tokens, sizes.parts * heads, *x.shape[2:])

    seen = others.seen[:, None]
    scaled = rows(out).astype(jnp.float32) * scale[0]
    return jnp.where(seen[..., None], scaled, 0.0).astype(out.dtype), jnp.where(seen, rows(lse), -jnp.inf)

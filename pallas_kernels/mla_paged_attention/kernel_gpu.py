"""mla_paged_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    the op's arguments -> [mla_paged_attention] -> query tiles -> attend_pieces -> merged and sorted by token

The 64 rows of a tile are tokens by heads: all heads, or the largest part of them that fits. Two launches share a step,
as in ragged_paged_attention: sequences that decode, whose keys are split over the card, and tiles of all others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.layouts import cdiv
from pallas_kernels.mla_paged_attention.gpu_attend import attend_pieces, fixed_bytes
from pallas_kernels.ragged_paged_attention import launches
from pallas_kernels.ragged_paged_attention.gpu_merge import merge_pieces
from pallas_kernels.ragged_paged_attention.gpu_plan import (
    MIN_GROUP_ROWS,
    MIN_STAGES,
    GpuConfig,
    Keys,
    compute_dtype,
    most_stages,
    plan_decode,
    reason_of_pages,
    to_compute_dtype,
)
from pallas_kernels.ragged_paged_attention.gpu_softmax import logit_scales
from pallas_kernels.ragged_paged_attention.gpu_tiles import TileField, TileShape, plan_tiles
from pallas_kernels.ragged_paged_attention.mask import MaskRule
from pallas_kernels.ragged_paged_attention.online_softmax import capped_sinks
from pallas_kernels.ragged_paged_attention.schedule import Batch

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
    if latent_dim % 128 or dim % 64 or latent_dim > _MOST_LATENT or dim > _MOST_DIM:
        return (
            f"GPU kernels take latents of up to {_MOST_LATENT} numbers in steps of 128 and up to {_MOST_DIM} with the "
            f"rotated key in steps of 64, got {latent_dim} and {dim}"
        )
    return mosaic_gpu.reason_without_hopper()


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
    tuning: Tuning = Tuning(),  # noqa: B008
) -> launches.Result:
    """(out [T, Hq, Dl] in the queries' dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    num_tokens, num_heads, latent_dim = q_nope.shape
    page_dtype = jnp.dtype(pages[0].dtype).name
    shape = tile_shape(num_heads)
    config = GpuConfig(
        mask=mask,
        soft_cap=soft_cap,
        num_kv_heads=num_heads // shape.heads,  # tiles of the same tokens
        group=shape.heads,
        head_dim=latent_dim + q_pe.shape[-1],
        head_dim_v=latent_dim,
        page_size=page_size,
        page_dtype=page_dtype,
        compute_dtype=compute_dtype(jnp.dtype(q_nope.dtype).name, page_dtype),
        block=mosaic_gpu.ROWS,
        stages=MIN_STAGES,
    )
    config = replace(config, stages=tuning.stages or _stages(config))
    step = _Step(
        q=to_compute_dtype(jnp.concatenate([q_nope, q_pe], axis=-1), config),
        pages=pages[0],
        block_tables=block_tables,
        scale=logit_scales(replace(config, num_kv_heads=1), sm_scale, k_scale),
        sinks=jnp.full((num_heads,), -jnp.inf, jnp.float32) if sinks is None else capped_sinks(sinks),
        v_scale=jnp.float32(1.0) if k_scale is None else k_scale.astype(jnp.float32).reshape(()),
        config=config,
        dtype=q_nope.dtype,
    )
    decoding, others = launches.split(seq_lens, query_start_loc, distribution, mask)
    first_token = jnp.minimum(query_start_loc[:-1], num_tokens - 1)
    out, lse = _decode(
        step, first_token, seq_lens, decoding.q_lens, distribution[0], tuning.num_blocks or mosaic_gpu.num_sms()
    )
    own_seq = launches.own_sequences(query_start_loc, num_tokens)
    tiled = _prefill(step, others, shape)
    return launches.by_token((out[own_seq], lse[own_seq]), tiled, decoding, others)


def tile_shape(num_heads: int) -> TileShape:
    """Tokens and heads of a tile: the most heads that divide `num_heads`, then the most tokens."""
    heads = max(n for n in range(1, min(num_heads, mosaic_gpu.ROWS) + 1) if num_heads % n == 0)
    return TileShape(mosaic_gpu.ROWS // heads, heads)


class _Step(NamedTuple):
    """What decoding and prefill share."""

    q: jax.Array  # [T, Hq, D] in the compute dtype
    pages: jax.Array
    block_tables: jax.Array
    scale: jax.Array  # float32[1] of `logit_scales`
    sinks: jax.Array  # float32[Hq], -inf: none
    v_scale: jax.Array  # float32[]
    config: GpuConfig
    dtype: Any  # of queries and results


def _stages(config: GpuConfig) -> int:
    """Blocks of latents that fit in shared memory."""
    elements = config.block * config.head_dim
    converted = 2 * elements if config.is_converted else 0
    free = mosaic_gpu.SMEM_BYTES - fixed_bytes(config.head_dim) - converted
    return max(MIN_STAGES, most_stages(free, elements * jnp.dtype(config.page_dtype).itemsize))


def padded_rows(q: jax.Array) -> jax.Array:
    """Query tiles [U, rows, D] with rows a multiple of 8."""
    return jnp.pad(q, [(0, 0), (0, cdiv(q.shape[1], MIN_GROUP_ROWS) * MIN_GROUP_ROWS - q.shape[1]), (0, 0)])


def _decode(
    step: _Step, first_token: jax.Array, seq_lens: jax.Array, q_lens: jax.Array, num_decode: jax.Array, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """(out [S, Hq, Dl], lse float32[S, Hq]) of the sequences that decode; 0 and -inf for others."""
    config = step.config
    plan = plan_decode(seq_lens, num_decode, q_lens, config, num_blocks)
    q = padded_rows(step.q[first_token].reshape(-1, config.group, config.head_dim))
    pieces = jnp.pad(plan.pieces, [(0, 0), (0, 2)])  # one token a tile: its bounds are the keys'
    tiles = pieces[:, 0] * config.num_kv_heads + pieces[:, 1]
    arguments = (q, step.pages, step.block_tables, pieces, tiles, plan.blocks, step.scale, config, 1, jnp.float32)
    v_scale = jnp.broadcast_to(step.v_scale, (config.num_kv_heads,))
    return merge_pieces(attend_pieces(*arguments), plan.units, step.sinks, v_scale, config.head_dim_v, step.dtype)


def _prefill(step: _Step, batch: Batch, shape: TileShape) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dl], lse float32[T, Hq]) of the sequences with queries in `batch`; the rest is undefined."""
    config, num_tokens, parts = step.config, step.q.shape[0], step.config.num_kv_heads
    padded = max(num_tokens, shape.tokens)
    table = plan_tiles(batch, config, shape, padded)
    num_tiles = table.shape[0]
    token = jnp.minimum(table[:, TileField.TOKEN, None] + jnp.arange(shape.tokens, dtype=jnp.int32), num_tokens - 1)
    q = step.q[token].reshape(num_tiles, shape.tokens, parts, shape.heads, config.head_dim).swapaxes(1, 2)
    q = padded_rows(q.reshape(num_tiles * parts, shape.tokens * shape.heads, config.head_dim))

    part = jnp.broadcast_to(jnp.arange(parts, dtype=jnp.int32), (num_tiles, parts)).reshape(-1, 1)
    table = jnp.repeat(table, parts, axis=0)
    keys = table[:, TileField.KEYS : TileField.KEYS + len(Keys._fields)]
    fields = (table[:, TileField.SEQ, None], part, keys, table[:, TileField.POS : TileField.SEQ_LEN + 1])
    number = jnp.arange(num_tiles * parts, dtype=jnp.int32)
    has_queries = table[:, TileField.NUM_QUERIES] > 0
    blocks = jnp.stack([number, number + has_queries], axis=1)[::-1]  # the last tiles see the most keys
    arguments = (q, step.pages, step.block_tables, jnp.concatenate(fields, axis=1), number, blocks, step.scale)
    out, lse = attend_pieces(*arguments, config, shape.tokens, step.dtype)

    first = jnp.where(has_queries, table[:, TileField.TOKEN] + table[:, TileField.SKIP], num_tokens)[::parts]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.maximum(jnp.sum(first[None] <= token[:, None], axis=1) - 1, 0)
    place = jnp.clip(token - table[tile * parts, TileField.TOKEN], 0, shape.tokens - 1)

    def by_token(x: jax.Array) -> jax.Array:
        rows = x[:, : shape.tokens * shape.heads].reshape(num_tiles, parts, shape.tokens, shape.heads, *x.shape[2:])
        return rows[tile, :, place].reshape(num_tokens, parts * shape.heads, *x.shape[2:])

    out, lse = by_token(out), by_token(lse)
    total = jnp.where(lse == -jnp.inf, -jnp.inf, jnp.logaddexp(lse, step.sinks))
    share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - total)) * step.v_scale
    return (out.astype(jnp.float32) * share[..., None]).astype(step.dtype), total

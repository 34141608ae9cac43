"""ragged_paged_attention on NVIDIA GPUs of Hopper, in Pallas Mosaic GPU.

Flow:    the op's arguments -> [ragged_paged_attention] -> decode_pieces, merge_pieces; prefill_tiles

Two launches share a step: sequences that decode, and tiles of all others. Either finds no work in a step that has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu
from pallas_kernels.ragged_paged_attention import gpu_decode, gpu_prefill, launches
from pallas_kernels.ragged_paged_attention.gpu_merge import merge_pieces
from pallas_kernels.ragged_paged_attention.gpu_plan import (
    MIN_STAGES,
    GpuConfig,
    block_slots,
    compute_dtype,
    kv_bytes,
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
from pallas_kernels.ragged_paged_attention.tuning import TunedShape, sizes_for


class Tuning(NamedTuple):
    """Sizes that change speed, not results; None: chosen by shape."""

    decode_block: int | None = None  # slots of a KV block
    decode_stages: int | None = None
    num_blocks: int | None = None  # thread blocks that share the work of decoding; None: one a multiprocessor
    prefill_block: int | None = None
    prefill_stages: int | None = None


def tuned(q: jax.Array, pages: tuple[jax.Array, ...], num_kv_heads: int, mask: MaskRule) -> Tuning:
    """Sizes of the card's file for these shapes, whose values are as wide as the keys; the rest by the shapes.

    Raises:
        ValueError: the card's file is broken.
    """
    if pages[0].shape[-1] != pages[1].shape[-1]:
        return Tuning()
    shape = TunedShape.of(q, pages[0], num_kv_heads, mask)
    return Tuning(**sizes_for(mosaic_gpu.card_name(), shape, Tuning._fields))


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
    if q.shape[1] > num_kv_heads * mosaic_gpu.ROWS:
        return f"GPU kernels take at most {mosaic_gpu.ROWS} query heads per KV head, got {q.shape[1] // num_kv_heads}"
    return mosaic_gpu.reason_without_hopper()


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
    tuning: Tuning | None = None,  # None: as tuned for the card, else by the shapes
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, Hq, Dv] in q's dtype, lse float32[T, Hq] or None) as `AttentionOutput` says."""
    num_tokens = q.shape[0]
    tuning = tuning or tuned(q, pages, num_kv_heads, mask)
    step = Step.of(q, pages, block_tables, mask, sm_scale, soft_cap, sinks, k_scale, v_scale, tuning)
    decoding, others = launches.split(seq_lens, query_start_loc, distribution, mask)
    first_token = jnp.minimum(query_start_loc[:-1], num_tokens - 1)
    out, lse = decode(step, q[first_token], seq_lens, decoding.q_lens, distribution[0])
    own_seq = launches.own_sequences(query_start_loc, num_tokens)
    tiled = prefill(step, q, others, return_lse)
    return launches.by_token((out[own_seq], lse[own_seq]), tiled, decoding, others)


class Step(NamedTuple):
    """What decoding and prefill share."""

    pages: tuple[jax.Array, jax.Array]
    block_tables: jax.Array  # int32[S, P]
    scales: jax.Array  # float32[Hkv] of `logit_scales`
    sinks: jax.Array  # float32[Hq], -inf: none
    v_scale: jax.Array  # float32[Hkv]
    config: GpuConfig  # but for the sizes of the ring
    tuning: Tuning
    dtype: str  # of queries and results

    @classmethod
    def of(
        cls,
        q: jax.Array,
        pages: tuple[jax.Array, ...],
        block_tables: jax.Array,
        mask: MaskRule,
        sm_scale: float,
        soft_cap: float | None,
        sinks: jax.Array | None,
        k_scale: jax.Array | None,
        v_scale: jax.Array | None,
        tuning: Tuning,
    ) -> Step:
        """From the op's arguments."""
        dtype, page_dtype = jnp.dtype(q.dtype).name, jnp.dtype(pages[0].dtype).name
        page_size, num_kv_heads, head_dim = pages[0].shape[1:]
        config = GpuConfig(
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
        )
        no_sinks = jnp.full((q.shape[1],), -jnp.inf, jnp.float32)
        ones = jnp.ones((num_kv_heads,), jnp.float32)
        return cls(
            pages=(pages[0], pages[1]),
            block_tables=block_tables,
            scales=logit_scales(config, sm_scale, k_scale),
            sinks=no_sinks if sinks is None else capped_sinks(sinks),
            v_scale=ones if v_scale is None else ones * v_scale.astype(jnp.float32),
            config=config,
            tuning=tuning,
            dtype=dtype,
        )

    def ring_config(self, fixed_bytes: int, block: int | None, stages: int | None) -> GpuConfig:
        """`config` with as many stages of KV blocks as shared memory holds beside `fixed_bytes`."""
        config = replace(self.config, block=block or self.config.block)
        stage, converted = kv_bytes(config)
        fitting = most_stages(mosaic_gpu.SMEM_BYTES - fixed_bytes - converted, stage)
        return replace(config, stages=stages or max(MIN_STAGES, fitting))


def decode(
    step: Step,
    q: jax.Array,  # [S, Hq, D] the query of each sequence that decodes
    seq_lens: jax.Array,  # int32[S]
    q_lens: jax.Array,  # int32[S]
    num_decode: jax.Array,  # int32[] sequences that decode: the first ones
) -> tuple[jax.Array, jax.Array]:
    """(out [S, Hq, Dv] in q's dtype, lse float32[S, Hq]); 0 and -inf for sequences that do not decode."""
    tuning = step.tuning
    fixed = gpu_decode.fixed_bytes(step.config.head_dim, step.config.head_dim_v)
    config = step.ring_config(fixed, tuning.decode_block, tuning.decode_stages)
    plan = plan_decode(seq_lens, num_decode, q_lens, config, tuning.num_blocks or mosaic_gpu.num_sms())
    q = to_compute_dtype(q, config)
    pieces = gpu_decode.decode_pieces(q, step.pages, step.block_tables, plan, step.scales, config)
    return merge_pieces(pieces, plan.units, step.sinks, step.v_scale, config.head_dim_v, step.dtype)


def prefill(step: Step, q: jax.Array, batch: Batch, return_lse: bool) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, Hq, Dv], lse float32[T, Hq] or None) of the sequences with queries in `batch`; the rest is undefined."""
    tuning, num_tokens = step.tuning, q.shape[0]
    fixed = gpu_prefill.fixed_bytes(step.config.head_dim, step.config.head_dim_v)
    block = tuning.prefill_block or gpu_prefill.prefill_block_slots(step.config.head_dim, step.config.head_dim_v)
    config = step.ring_config(fixed, block, tuning.prefill_stages)
    shape = TileShape.of(config.group)
    if num_tokens < shape.tokens:
        q = jnp.pad(q, [(0, shape.tokens - num_tokens), (0, 0), (0, 0)])
    tiles = plan_tiles(batch, config, shape, q.shape[0])
    arguments = (q, step.pages, step.block_tables, tiles, step.scales, step.sinks, step.v_scale, config)
    out, row_lse = gpu_prefill.prefill_tiles(*arguments)
    if not return_lse:
        return out[:num_tokens], None
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    first = jnp.where(
        tiles[:, TileField.NUM_QUERIES] > 0, tiles[:, TileField.TOKEN] + tiles[:, TileField.SKIP], num_tokens
    )
    tile = jnp.maximum(jnp.sum(first[None] <= token[:, None], axis=1) - 1, 0)
    by_head = row_lse[..., : shape.heads * shape.tokens].reshape(*row_lse.shape[:2], shape.heads, shape.tokens)
    place = jnp.clip(token - tiles[tile, TileField.TOKEN], 0, shape.tokens - 1)
    return out[:num_tokens], by_head[tile, :, :, place].reshape(num_tokens, -1)

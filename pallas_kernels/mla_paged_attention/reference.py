"""mla_paged_attention in plain jnp: the specification, and the CPU path.

Flow:    api -> [reference] -> (out, lse)

The reference of ragged_paged_attention over one KV head that all query heads share.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.key_share import KeyShare
from pallas_kernels.latent_pages import LatentPages, LatentTiles
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.reference import attend_pages, by_kv_head
from pallas_kernels.schedule import Batch


@functools.partial(jax.jit, static_argnames=("mask", "sm_scale", "soft_cap", "page_size", "is_decode"))
def mla_paged_attention(
    q_nope: jax.Array,  # [T, Hq, Dl]
    q_pe: jax.Array,  # [T, Hq, Dr]
    pages: tuple[jax.Array, ...],
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
    share: KeyShare | None = None,
    is_decode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dl] in the dtype of `q_nope`, lse float32[T, Hq]) as `AttentionOutput` says."""
    q = by_kv_head(jnp.concatenate([q_nope, q_pe], axis=-1), 1) * sm_scale
    scale = jnp.asarray(1.0 if k_scale is None else k_scale, jnp.float32)
    cache = LatentTiles(LatentPages(pages[0], page_size, q.shape[-1]), block_tables, q_nope.shape[-1], share)
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    out, lse = attend_pages(q * scale, cache, mask, batch, soft_cap=soft_cap, sinks=sinks, is_decode=is_decode)
    return (out * scale)[:, 0].astype(q_nope.dtype), lse[:, 0]

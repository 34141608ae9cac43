"""mla_paged_attention in plain XLA, vectorised: what GPUs run whose kernels cannot take a call.

Flow:    api -> [mla_paged_attention] -> the walks of pallas_kernels.xla -> (out, lse)

One KV head that all query heads share. Its latents are gathered once: as keys, and as values that are cut to the latent
after the product, since a cut before it would be one more copy.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.key_share import KeyShare
from pallas_kernels.latent_pages import LatentPages, LatentTiles
from pallas_kernels.lazy import lazy
from pallas_kernels.mask import MaskRule
from pallas_kernels.packed_pages import states_of_pages
from pallas_kernels.schedule import Batch
from pallas_kernels.xla.tiles import Limits, TileQueries
from pallas_kernels.xla.walks import Step, attend_step, per_head, product_dtype

if TYPE_CHECKING:
    from pallas_kernels.triton import walks as triton
else:
    triton = lazy("pallas_kernels.triton.walks")


@functools.partial(jax.jit, static_argnames=("mask", "sm_scale", "soft_cap", "page_size", "limits", "by_triton"))
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
    limits: Limits = Limits(),  # noqa: B008
    by_triton: triton.Limits | None = None,  # kernels in Triton, not plain XLA
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dl] in the dtype of `q_nope`, lse float32[T, Hq]) as `AttentionOutput` says."""
    q = jnp.concatenate([q_nope, q_pe], axis=-1)
    cache = LatentTiles(LatentPages(pages[0], page_size, q.shape[-1]), block_tables, q_nope.shape[-1], share)
    scale = per_head(k_scale, 1)
    queries = TileQueries(q.astype(product_dtype(q.dtype, pages[0].dtype))[:, None], sm_scale * scale, soft_cap)
    step = Step(queries, cache, mask, sinks, scale, q_nope.dtype, limits)
    batch = Batch.of_step(seq_lens, query_start_loc, distribution)
    if by_triton is not None:
        out, lse = triton.attend_step(step, batch, (states_of_pages(pages[0]), None), by_triton)
    else:
        out, lse = attend_step(step, batch)
    return out[:, 0], lse[:, 0]

"""ragged_paged_attention in plain XLA, vectorised: what GPUs run whose kernels cannot take a call.

Flow:    api -> [ragged_paged_attention] -> the walks of pallas_kernels.xla -> out, lse by token
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax

from pallas_kernels.key_share import KeyShare
from pallas_kernels.lazy import lazy
from pallas_kernels.mask import MaskRule
from pallas_kernels.paged_tiles import PagedTiles
from pallas_kernels.schedule import Batch
from pallas_kernels.xla.tiles import Limits, TileQueries
from pallas_kernels.xla.walks import Step, attend_step, per_head, product_dtype

if TYPE_CHECKING:
    from pallas_kernels.triton import walks as triton
else:
    triton = lazy("pallas_kernels.triton.walks")


@functools.partial(jax.jit, static_argnames=("mask", "num_kv_heads", "sm_scale", "soft_cap", "limits", "by_triton"))
def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: tuple[jax.Array, ...],
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
    share: KeyShare | None = None,
    sink_tokens: jax.Array | None = None,  # int32[S] where the mask has them by sequence
    limits: Limits = Limits(),  # noqa: B008
    by_triton: triton.Limits | None = None,  # kernels in Triton, not plain XLA
) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, Dv] in q's dtype, lse float32[T, Hq]) as `AttentionOutput` says."""
    num_tokens, _, head_dim = q.shape
    cache = PagedTiles(pages, block_tables, num_kv_heads, head_dim, share)
    heads = q.astype(product_dtype(q.dtype, pages[0].dtype)).reshape(num_tokens, num_kv_heads, -1, head_dim)
    scale = sm_scale * per_head(k_scale, num_kv_heads)
    batch = Batch.of_step(seq_lens, query_start_loc, distribution, sink_tokens)
    queries = TileQueries(heads, scale, soft_cap)
    step = Step(queries, cache, mask, sinks, per_head(v_scale, num_kv_heads), q.dtype, limits)
    if by_triton is not None:
        out, lse = triton.attend_step(step, batch, (pages[0], pages[1]), by_triton)
    else:
        out, lse = attend_step(step, batch)
    return out.reshape(num_tokens, q.shape[1], -1), lse.reshape(q.shape[:2])

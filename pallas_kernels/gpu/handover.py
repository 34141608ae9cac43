"""What the warpgroup that makes scores hands to those that add values, in latent attention on the GPU.

Flow:    softmax of a piece -> [give_share] -> shared memory -> [take_share] -> [store_columns]
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic


def give_share(refs: Any, piece: jax.Array, has_given: jax.Array, share: jax.Array, lse: jax.Array) -> None:
    """Hands over what the sums of a piece are multiplied with at its end, float32[64], and stores its LSE.

    `refs`: `lse` in global memory, `share` and `lse_tile` float32[64] in shared memory, barriers `done` and `stored`.
    `has_given`: whether this warpgroup has handed over one before, which the adding ones must have read.
    """
    pl.when(has_given)(lambda: plgpu.barrier_wait(refs.stored))
    refs.share[...] = share
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    refs.lse_tile[...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.lse_tile, refs.lse.at[piece])
    plgpu.barrier_arrive(refs.done)


def take_share(refs: Any) -> jax.Array:
    """What `give_share` hands over, in an adding warpgroup."""
    plgpu.barrier_wait(refs.done)
    share = mosaic.load_per_row(refs.share)
    plgpu.barrier_arrive(refs.stored)
    return share


def store_columns(target: Any, piece: jax.Array, warpgroup: jax.Array, out: jax.Array) -> None:
    """Stores a warpgroup's columns of a piece straight from registers."""
    columns = out.shape[1]
    own = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns)
    mosaic.store_plain(target.at[piece, :, own], out.astype(target.dtype))

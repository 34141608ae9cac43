"""Blocks that a group holds for good, outside every request: those of attention sinks.

Flow:    SingleTypeKVCacheManager, when it is made -> [take_reserved_blocks] -> BlockPool
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvjax.core.spec import KVCacheSpec

if TYPE_CHECKING:
    from kvjax.core.pool.block_pool import BlockPool


def take_reserved_blocks(
    spec: KVCacheSpec, pool: BlockPool, group_ids: tuple[int, ...], block_size: int
) -> np.ndarray:  # int32[G, k], read-only
    """Takes what each of the groups reserves; a block stands for `block_size` tokens over all ranks.

    Raises:
        ValueError: the pool has too few free blocks, or the tokens do not divide among the ranks. It is unchanged.
    """
    num_tokens = spec.num_reserved_blocks * spec.block_size
    if num_tokens % block_size:
        raise ValueError(
            f"expected sink_len to be a multiple of the {block_size} tokens of a block over all ranks of context "
            f"parallelism, got {num_tokens}"
        )
    num_blocks = len(group_ids) * (num_tokens // block_size)
    if num_blocks > pool.num_free_blocks:
        raise ValueError(
            f"expected a pool with {num_blocks} free blocks for the sinks of groups {group_ids}, got "
            f"{pool.num_free_blocks}; give the pool more blocks"
        )
    ids = pool.take_for_good(num_blocks) if num_blocks else np.empty(0, np.int32)
    ids = ids.reshape(len(group_ids), -1) if num_blocks else np.empty((len(group_ids), 0), np.int32)
    ids.flags.writeable = False
    return ids


__all__ = ["take_reserved_blocks"]

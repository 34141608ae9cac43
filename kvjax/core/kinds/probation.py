"""Which registered blocks go before all others: those that no checkpoint needs, until a hit used them, and idle copies.

Flow:    SingleTypeKVCacheManager, RowBlocks -> [put_on_probation, keep_checkpoint, ...] -> EvictionPolicy of the pool
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.tables.small_arrays import any_true, count_true


class KeptRows(Protocol):
    """The manager whose rows they are."""

    block_pool: BlockPool
    group_ids: tuple[int, ...]
    first_live: np.ndarray  # int64[rows]

    @property
    def block_tables(self) -> np.ndarray:  # int32[G, rows, columns]
        """The tables of all groups."""


def put_on_probation(pool: BlockPool, block_ids: np.ndarray) -> None:
    """Tells the policy of int32[...] registered blocks."""
    pool.eviction_policy.note_probation(block_ids)
    if pool.tier_link is not None:
        pool.tier_link.on_probation[block_ids] = True


def take_off_probation(pool: BlockPool, block_ids: np.ndarray) -> None:
    """Tells the policy of int64[n] registered blocks."""
    pool.eviction_policy.note_lasting(block_ids)
    if pool.tier_link is not None:
        pool.tier_link.on_probation[block_ids] = False


def keep_checkpoint(manager: KeptRows, row: int, block_hashes: Sequence[BlockHash], first: int, end: int) -> None:
    """Takes the blocks in a row's columns from `first` to `end` off probation, used now, if all of them are cached.

    `block_hashes` are the request's at the manager's block size.
    """
    pool = manager.block_pool
    held_from = min(max(first, manager.first_live.item(row)), end)
    blocks = [manager.block_tables[:, row, held_from:end].ravel()]
    if first < held_from:
        blocks += [pool.find_each(block_hashes[first:held_from], group_id) for group_id in manager.group_ids]
    ids = np.concatenate(blocks).astype(np.int64)
    if not any_true(ids < 1) and count_true(pool.is_hashed[ids]) == ids.size:
        take_off_probation(pool, ids)


def forget_idle_copies(manager: KeptRows, block_hashes: Sequence[BlockHash], first: int, end: int) -> None:
    """Forgets free blocks of the hashes from `first` to `end`; the block registered last for a hash stays."""
    pool = manager.block_pool
    for group_id in manager.group_ids:
        hash_map = pool.hash_maps[group_id]
        copies = hash_map.blocks_of_shared(block_hashes[first:end]) if hash_map.num_shared else ()
        idle = [block_id for blocks in copies for block_id in blocks[:-1] if not pool.ref_count[block_id]]
        if idle:
            pool.evict_blocks(idle)


__all__ = ["forget_idle_copies", "keep_checkpoint", "put_on_probation", "take_off_probation"]

"""Leading columns that a kind keeps though later ones are released: those of tokens that all others see.

Flow:    hit of a new request -> [num_missing, hold_kept, take_missing] -> table of a SingleTypeKVCacheManager
Source:  first tokens as attention sinks: StreamingLLM (arXiv 2309.17453)

    columns   0 ... num_kept_columns - 1 | ... null ... | first_live ... num_blocks - 1
              kept to the end            | released     | seen by the window
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvjax.core.pool.block_pool import BlockPool


class KeptColumns(Protocol):
    """The manager whose tables they are in."""

    block_pool: BlockPool
    num_kept_columns: int
    num_cached_blocks: np.ndarray  # int64[rows]

    @property
    def num_groups(self) -> int:
        """G."""

    @property
    def block_tables(self) -> np.ndarray:  # int32[G, rows, columns]
        """The tables of all groups."""


def num_missing(manager: KeptColumns, num_hit: int, num_skipped: int) -> int:
    """How many of the columns kept before the first `num_skipped` a hit of `num_hit` columns lacks."""
    return max(min(manager.num_kept_columns, num_skipped) - num_hit, 0)


def hold_kept(manager: KeptColumns, row: int, hit_ids: np.ndarray, num_skipped: int) -> None:
    """Holds those of a hit's blocks int32[G, k] that are kept though its first `num_skipped` columns are not."""
    if not manager.num_kept_columns:
        return
    kept = hit_ids[:, : min(manager.num_kept_columns, num_skipped)]
    manager.block_pool.touch(kept.ravel())
    manager.block_tables[:, row, : kept.shape[1]] = kept


def take_missing(manager: KeptColumns, row: int, num_hit: int, num_skipped: int) -> None:
    """Takes blocks for kept columns whose tokens come from outside, when the hits of all groups are held."""
    count = num_missing(manager, num_hit, num_skipped)
    if count:
        ids = manager.block_pool.get_new_blocks(manager.num_groups * count).reshape(manager.num_groups, -1)
        manager.block_tables[:, row, num_hit : num_hit + count] = ids
        manager.num_cached_blocks[row] = num_hit


__all__ = ["hold_kept", "num_missing", "take_missing"]

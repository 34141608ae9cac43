"""What holds in the block tables of one manager at any time.

Flow:    SingleTypeKVCacheManager.check_invariants -> [check_tables] -> InvariantError

    G1  0 <= first_live <= num_blocks <= columns, and num_cached_blocks <= num_blocks
    G2  a row's entries are the null block outside [first_live, num_blocks) and a block of the pool inside, where
        positions are stable (else some are null inside, too); inside are its first `kept_columns_of` it, too
    G3  a row that no request owns has all counts 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import InvariantError


class Tables(Protocol):
    """What the laws speak of: the block tables and counts of one manager."""

    group_ids: tuple[int, ...]
    block_pool: BlockPool
    num_blocks: np.ndarray  # int64[rows]
    num_cached_blocks: np.ndarray  # int64[rows]
    first_live: np.ndarray  # int64[rows]

    @property
    def block_tables(self) -> np.ndarray:  # int32[G, rows, columns]
        """The tables of all groups."""

    def kept_columns_of(self, row: np.ndarray) -> int | np.ndarray:
        """Leading columns of each of int64[n] rows that are never released before the request ends."""

    def find_misplaced(self, is_block: np.ndarray, inside: np.ndarray) -> str | None:
        """What G2 wants and bool[G, rows, columns] blocks break; None: nothing."""


def check_tables(manager: Tables, owned_rows: Sequence[int]) -> None:
    """Raises InvariantError if G1 to G3 do not hold; requests own `owned_rows`."""
    groups, tables = f"groups {manager.group_ids}", manager.block_tables
    first_live, num_blocks, num_columns = manager.first_live, manager.num_blocks, tables.shape[2]
    if not np.all((first_live >= 0) & (first_live <= num_blocks) & (num_blocks <= num_columns)):
        raise InvariantError(f"G1, {groups}: expected 0 <= first_live <= num_blocks <= {num_columns} in every row")
    if (manager.num_cached_blocks > num_blocks).any():
        raise InvariantError(f"G1, {groups}: a row has more registered blocks than blocks")
    columns = np.arange(num_blocks.max(initial=0) + 1)  # the last one is beyond every row, and stands for the rest
    num_kept = np.reshape(manager.kept_columns_of(np.arange(num_blocks.size)), (-1, 1))
    inside = (columns >= first_live[:, None]) | (columns < num_kept)
    inside &= columns < num_blocks[:, None]
    is_block = np.zeros((len(tables), *inside.shape), np.bool_)
    used = tables[:, :, : columns.size - 1]
    is_block[:, :, :-1] = used != 0
    is_block[:, :, -1] = tables[:, :, columns.size - 1 :].any(axis=2)
    wrong = manager.find_misplaced(is_block, inside)
    if wrong is not None:
        raise InvariantError(f"G2, {groups}: {wrong}")
    size = manager.block_pool.num_blocks
    if used.size and not 0 <= used.min() <= used.max() < size:
        raise InvariantError(f"G2, {groups}: a block id is outside its pool of {size} blocks")
    unowned = np.ones(num_blocks.size, bool)
    unowned[list(owned_rows)] = False
    if num_blocks[unowned].any() or manager.num_cached_blocks[unowned].any():
        raise InvariantError(f"G3, {groups}: a row that no request owns holds blocks")


__all__ = ["check_tables"]

"""Forked requests share even the block that is only partly filled; who writes to it first takes a copy.

Flow:    fork -> rows marked as sharing -> [CopyOnWrite] when a row gets slots -> PageEdits -> page copies of the step
Source:  ARCHITECTURE.md, "Forks"

Of k requests that share a block, k - 1 take a copy when they write, and the last one writes in place: nobody reads what
it writes. A row shares at most one such block per group, that of the next token, and is marked from the fork until it
gets slots for that token. Nothing of this costs anything to rows that are not marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager


class TableEntry(NamedTuple):
    """A place in a row of a group's block table, and the block there."""

    manager: SingleTypeKVCacheManager
    pool_id: int
    group: int  # place among the manager's groups
    column: int
    block_id: int


class CopyOnWrite:
    """The rows that share a partly filled block. Owned by one `RowBlocks`."""

    def __init__(self, groups: GroupManagers) -> None:
        self._managers = groups.managers
        self._pool_ids = groups.pool_ids
        self._pools = groups.pools
        self.is_sharing = np.zeros(0, np.bool_)  # [rows]
        self.num_sharing = 0

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the array hold `num_rows` rows."""
        self.is_sharing = np.pad(self.is_sharing, (0, num_rows - self.is_sharing.size))

    def mark(self, row: int) -> None:
        """Notes that a row shares a block that it may write to."""
        self.num_sharing += not self.is_sharing[row]
        self.is_sharing[row] = True

    def is_marked(self, row: int) -> bool:
        """Whether a row shares a block that it may write to."""
        return bool(self.num_sharing and self.is_sharing[row])

    def unmark(self, row: int) -> None:
        """Notes that a row shares no such block any more."""
        if self.num_sharing:
            self.num_sharing -= self.is_sharing.item(row)
            self.is_sharing[row] = False

    def writes_to_its_blocks(self, row: int, num_computed: int) -> bool:
        """Whether the row's next token goes to a block that it has already."""
        return any(manager.written_column(row, num_computed) is not None for manager in self._managers)

    def num_copies(self, row: int, num_computed: int) -> list[int]:
        """Per pool the blocks that a marked row takes to write its next token."""
        needs = [0] * len(self._pools)
        for entry in self._written_entries(row, num_computed):
            needs[entry.pool_id] += self._is_shared(entry)
        return needs

    def make_exclusive(self, row: int, num_computed: int) -> None:
        """Puts copies where a marked row is going to write to shared blocks, and unmarks it; there are blocks for them.

        A block that is the row's alone, but was registered by another request that filled it further, ceases to be a
        prefix hit: the row writes other tokens there.
        """
        for entry in list(self._written_entries(row, num_computed)):
            pool, manager = self._pools[entry.pool_id], entry.manager
            if self._is_shared(entry):
                new_ids = pool.page_edits.exchange_for_copies([entry.block_id])
                manager.block_tables[entry.group, row, entry.column] = new_ids[0]
            elif pool.is_hashed[entry.block_id] and entry.column >= manager.num_cached_blocks[row]:
                pool.evict_blocks([entry.block_id], was_reused=True)
        self.unmark(row)

    def _written_entries(self, row: int, num_computed: int) -> Iterator[TableEntry]:
        """Where the row's next token goes to a block that it has already, group by group."""
        for manager, pool_id in zip(self._managers, self._pool_ids, strict=True):
            column = manager.written_column(row, num_computed)
            if column is not None:
                for group, block_id in enumerate(manager.block_tables[:, row, column].tolist()):
                    yield TableEntry(manager, pool_id, group, column, block_id)

    def _is_shared(self, entry: TableEntry) -> bool:
        pool = self._pools[entry.pool_id]
        return bool(pool.ref_count[entry.block_id] - pool.outside_refs.counts[entry.block_id] > 1)


__all__ = ["CopyOnWrite"]

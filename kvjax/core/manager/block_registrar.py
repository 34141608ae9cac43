"""Blocks that filled become prefix hits, those of many rows at once.

Flow:    StepPlanner, DraftSettler -> [BlockRegistrar] -> SingleTypeKVCacheManager.register -> prefix index, events
"""

from __future__ import annotations

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.tables.column_runs import Runs


class BlockRegistrar:
    """Registers blocks of all groups under the hashes of one request table. Owned by one `KVCacheManager`."""

    def __init__(self, groups: GroupManagers, request_table: RequestTable) -> None:
        self._groups = groups
        self._table = request_table

    def cacheable_tokens(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:  # int64[n]
        """How many of the first int64[n] tokens of each row lie in blocks that may be registered: known and hashed."""
        if not self._groups.options.enable_caching:
            return np.zeros_like(num_tokens)
        hash_block_size = self._groups.hashing.hash_block_size
        num_cacheable = np.minimum(self._table.num_hashed_blocks[rows] * hash_block_size, num_tokens)
        if self._groups.rswa_window is not None:
            longest = self._table.num_prompt_tokens[rows] + self._groups.rswa_window
            num_cacheable = np.minimum(num_cacheable, longest)
        if self._table.num_skipping:
            num_cacheable[self._table.skips_registration[rows]] = 0
        return num_cacheable

    def register_up_to(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Registers what is not yet of the blocks that the first int64[n] tokens of int64[n] rows fill."""
        num_cacheable = self.cacheable_tokens(rows, num_tokens)
        for manager in self._groups.cacheable:
            cached, full = manager.num_cached_blocks[rows], manager.full_column(rows, num_cacheable)
            filled = Runs.between(rows, cached, full)
            if filled.num_columns:
                self.register(manager, filled, num_cacheable)
                manager.num_cached_blocks[rows] = np.maximum(cached, full)

    def register(self, manager: SingleTypeKVCacheManager, filled: Runs, num_cacheable: np.ndarray) -> None:
        """Registers the blocks of the manager's groups in columns that filled, of rows with int64[n] such tokens."""
        if manager.block_pool.enable_kv_cache_events or manager.sub_blocks is not None:  # they want tokens and parents
            for row, num_tokens in zip(filled.rows.tolist(), num_cacheable[filled.positions].tolist(), strict=True):
                request = self._table.requests[row]
                assert request is not None  # the rows were checked
                hashes = self._groups.hashing.of_block_size(request.block_hashes, manager.block_size)
                manager.cache_blocks(request, row, hashes, num_tokens)
            return
        rows, columns = filled.entries()
        if manager.computed_blocks is not None:
            manager.computed_blocks.add(self._hashes(manager.block_size, rows, columns))
        entries = rows, columns, ids = manager.find_registered(rows, columns)
        if not rows.size:
            return
        manager.register(entries, self._hashes(manager.block_size, rows, columns))
        if manager.block_pool.origins is not None:
            origins = [request.origin for row in rows.tolist() if (request := self._table.requests[row]) is not None]
            manager.block_pool.origins.note_many(ids, origins)

    def _hashes(self, block_size: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """object[k] the hash of each entry of a table with blocks of that size."""
        table, hashing = self._table, self._groups.hashing
        if block_size == hashing.hash_block_size and np.logical_and.reduce(
            table.num_hashed_blocks[rows] == columns + 1
        ):
            return table.last_hashes[rows]
        hashes = hashing.of_blocks((table.block_hashes[row] for row in rows.tolist()), block_size, columns.tolist())
        return np.fromiter(hashes, np.object_, rows.size)


__all__ = ["BlockRegistrar"]

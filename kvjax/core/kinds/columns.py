"""Kinds whose rows grow by a block whenever their slots need one: column i holds slots i * block_size and on.

Flow:    PositionalManager, EncoderManager say what slots are -> [ColumnManager] -> SingleTypeKVCacheManager
Source:  vLLM v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

import numpy as np

from kvjax.core.kinds.kept_columns import num_missing
from kvjax.core.kinds.manager_settings import TableLayout
from kvjax.core.kinds.single_type_manager import Entries, SingleTypeKVCacheManager
from kvjax.core.kinds.state_steps import StateBlocks
from kvjax.core.spec import cdiv


class ColumnManager(SingleTypeKVCacheManager):
    """Appends blocks and shares leading ones; every column from the first live one on has a block."""

    def table_layout(self) -> TableLayout:
        """A column is a block over all ranks of context parallelism."""
        settings = self.settings
        block_size = self.kv_cache_spec.block_size * settings.context_parallel_size
        return TableLayout(
            block_size=block_size,
            num_tail_columns=0,
            enable_caching=settings.options.enable_caching and self.is_prefix_cacheable,
            same_step_hits=settings.options.same_step_hits,
        )

    def find_misplaced(self, is_block: np.ndarray, inside: np.ndarray) -> str | None:
        """Blocks stand exactly inside."""
        in_place = (is_block == inside).all()
        return None if in_place else "expected null blocks exactly outside [first_live, num_blocks)"

    @property
    def state_blocks(self) -> StateBlocks | None:
        """None: steps may end anywhere."""
        return None

    def num_blocks_for_new(self, num_slots: int, hit_ids: np.ndarray, total_computed: int, capped: bool) -> int:
        """Columns that the hit and what is skipped leave, and blocks of the hit that are free."""
        required = cdiv(num_slots, self.block_size)
        if capped:
            required = min(required, self.max_admission_blocks)
        if not total_computed and not hit_ids.size:
            return self.num_groups * required
        skipped = self.get_num_skipped_tokens(total_computed) // self.block_size
        live = hit_ids[:, skipped:]
        missing = 0
        if self.num_kept_columns:
            missing = num_missing(self, hit_ids.shape[1], skipped)
            live = np.concatenate([hit_ids[:, : min(self.num_kept_columns, skipped)], live], axis=1)
        evictable = int(((self.block_pool.ref_count[live] == 0) & (live != 0)).sum()) if live.size else 0
        return self.num_groups * (max(required - max(skipped, hit_ids.shape[1]), 0) + missing) + evictable

    def allocate_new_blocks(self, row: int, num_slots: int) -> np.ndarray:
        """Appends new blocks until the row has `num_slots` slots.

        Returns:
            int32[G, k] their ids.
        """
        held = self.num_blocks.item(row)
        required = -(-num_slots // self.block_size)
        if required <= held:
            return self.no_blocks
        if required > self._table.num_columns:
            self._table.reserve_columns(required)
        num_new = self.num_groups * (required - held)
        if num_new == 1:
            ids = np.array([[self.block_pool.get_new_block()]], np.int32)
        elif self.num_groups == 1:
            ids = self.block_pool.get_new_blocks(num_new)[None]
        else:
            ids = self.block_pool.get_new_blocks(num_new).reshape(self.num_groups, -1)
        self._table.entries[:, row, held:required] = ids
        self.num_blocks[row] = required
        return ids

    def num_blocks_for_share(self, num_rows: int) -> int:
        """None: references take no block."""
        return 0

    def share_columns(self, row: int, new_rows: np.ndarray, count: int) -> None:
        """Gives int64[n] new rows the row's first `count` columns, by reference."""
        entries = self.block_tables[:, row, :count]
        self.block_pool.touch(np.tile(entries.ravel(), new_rows.size))
        self.block_tables[:, new_rows, :count] = entries[:, None]
        self.num_blocks[new_rows] = count
        self.first_live[new_rows] = min(self.first_live.item(row), count)
        if self.prompt_columns is not None:
            self.prompt_columns.counts[new_rows] = self.prompt_columns.counts[row]

    def attach(self, rows: np.ndarray, columns: np.ndarray, block_ids: np.ndarray) -> Entries:
        """Writes int32[G, k] new blocks into the tables at int64[k] rows and columns, and returns these."""
        if self._table.num_columns < self.max_columns:
            self._table.reserve_columns(int(np.maximum.reduce(columns)) + 1)
        self.block_tables[:, rows, columns] = block_ids
        return rows, columns, block_ids

    def take_back(self, rows: np.ndarray, num_tokens: np.ndarray, num_kept: np.ndarray) -> Entries:
        """Nothing changes: blocks stay, and the tokens that follow are written over those taken back."""
        return rows[:0], rows[:0], self.no_blocks

    def move_back(self, row: int, num_tokens: int) -> None:
        """Nothing changes: blocks stay for the tokens that follow."""


__all__ = ["ColumnManager"]

"""Kinds whose columns are the request's own tokens, `block_size` each, in order.

Flow:    KVCacheSpec says which tokens are seen -> [PositionalManager] -> ColumnManager
Source:  vLLM v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np

from kvjax.core.kinds.column_scans import LocalScan, WholePrefixScan
from kvjax.core.kinds.columns import ColumnManager
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.spec import NEVER, cdiv
from kvjax.core.tables.column_runs import NO_RUNS, Runs
from kvjax.core.tables.row_changes import RowChanges


@final
class PositionalManager(ColumnManager):
    """Hits, needs, shares and steps of rows whose slots are tokens."""

    supports_sub_block_hits: ClassVar[bool] = True

    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """From the left where every token stays visible, else from the right."""
        return LocalScan(self, lookup) if self.forgets else WholePrefixScan(self, lookup)

    @property
    def max_encoder_tokens(self) -> int:
        """`NEVER`: they take no slots here."""
        return NEVER

    def slots_of(self, num_slots: int, num_encoder_tokens: int) -> int:
        """The slots of the request's tokens."""
        return num_slots

    def worst_case_blocks(self, num_slots: int) -> int:
        """Blocks of all slots, or as many as the kind ever holds."""
        return self.num_groups * min(cdiv(num_slots, self.block_size), self.max_admission_blocks)

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """Columns that the row lacks; 0 if rejected drafts left more than enough."""
        required = cdiv(num_slots, self.block_size)
        if capped:
            required = min(required, self.max_admission_blocks)
        return self.num_groups * max(required - self.num_blocks.item(row), 0)

    def held_slots(self, row: int) -> int:
        """Slots of the row's columns."""
        return self.num_blocks.item(row) * self.block_size

    def written_column(self, row: int, num_tokens: int) -> int | None:
        """The one that token `num_tokens` falls inside; None where it begins one, or that has no block yet."""
        column = num_tokens // self.block_size
        return column if num_tokens % self.block_size and column < self.num_blocks[row] else None

    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows the columns of the row's first `num_tokens` tokens, by reference."""
        self.share_columns(row, new_rows, cdiv(num_tokens, self.block_size))
        self.num_cached_blocks[new_rows] = min(self.num_cached_blocks.item(row), num_tokens // self.block_size)

    def plan_rows(
        self, rows: np.ndarray, settled_tokens: np.ndarray, num_slots: np.ndarray, num_cacheable: np.ndarray
    ) -> RowChanges:
        """What one step of int64[n] rows changes: columns appended, filled, and skipped."""
        size = self.block_size
        held, cached, first = self.num_blocks[rows], self.num_cached_blocks[rows], NO_RUNS.starts
        required, skipped = (num_slots + (size - 1)) // size, NO_RUNS
        full = num_cacheable // size if self.is_prefix_cacheable else cached
        num_blocks, num_cached_blocks = np.maximum(held, required), np.maximum(cached, full)
        idle_until = np.minimum(num_blocks * size, self.settings.max_model_len)
        if self.enable_caching:
            idle_until = np.minimum(idle_until, num_cached_blocks * size + (size - 1))
        if self.releases:
            before = self.first_live[rows]
            first = np.minimum(self.get_num_released_tokens(settled_tokens) // size, held)
            first = np.maximum(first, before)
            following = first
            if self.keeps_columns:
                kept = self.kept_columns_of(rows)
                before, following = np.maximum(before, kept), np.maximum(first, kept)
            skipped = Runs.between(rows, before, first)
            idle_until = np.minimum(idle_until, self.tokens_until_release(following))
        return RowChanges(
            skipped=skipped,
            needed=Runs.between(rows, held, required),
            filled=Runs.between(rows, cached, full),
            num_blocks=num_blocks,
            num_cached_blocks=num_cached_blocks,
            first_live=first,
            idle_until=idle_until,
        )


__all__ = ["PositionalManager"]

"""Kinds whose columns are the encoder's tokens: all blocks are taken when a request is admitted.

Flow:    CrossAttentionSpec -> [EncoderManager] -> ColumnManager
Source:  vLLM v1/core/single_type_kv_cache_manager.py (CrossAttentionManager)
"""

from __future__ import annotations

from typing import final

import numpy as np

from kvjax.core.kinds.columns import ColumnManager
from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.spec import NEVER
from kvjax.core.tables.column_runs import NO_RUNS
from kvjax.core.tables.row_changes import RowChanges


@final
class EncoderManager(ColumnManager):
    """Blocks by encoder tokens, for the request's whole life."""

    kv_cache_spec: CrossAttentionSpec

    @property
    def max_encoder_tokens(self) -> int:
        """As the spec says."""
        return self.kv_cache_spec.max_num_encoder_tokens

    def slots_of(self, num_slots: int, num_encoder_tokens: int) -> int:
        """Slots are the encoder's tokens."""
        return num_encoder_tokens

    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """Nothing is ever registered.

        Raises:
            NotImplementedError: always; coordinators do not ask.
        """
        raise NotImplementedError("cross_attention blocks are no prefix hits; look up the other groups")

    def worst_case_blocks(self, num_slots: int) -> int:
        """Blocks of the longest encoder input."""
        return self.num_groups * self.max_admission_blocks

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> int:
        """None: decoding takes no blocks."""
        return 0

    def held_slots(self, row: int) -> int:
        """`NEVER`: the encoder's blocks serve any number of tokens."""
        return NEVER

    def written_column(self, row: int, num_tokens: int) -> int | None:
        """None: decoding writes nothing."""
        return None

    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows all of the row's blocks, by reference."""
        self.share_columns(row, new_rows, self.num_blocks.item(row))

    def plan_rows(
        self, rows: np.ndarray, settled_tokens: np.ndarray, num_slots: np.ndarray, num_cacheable: np.ndarray
    ) -> RowChanges:
        """No change."""
        return RowChanges(
            skipped=NO_RUNS,
            needed=NO_RUNS,
            filled=NO_RUNS,
            num_blocks=self.num_blocks[rows],
            num_cached_blocks=self.num_cached_blocks[rows],
            first_live=NO_RUNS.starts,
            idle_until=np.full(rows.size, NEVER),
        )


__all__ = ["EncoderManager"]

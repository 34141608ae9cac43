"""Rejected drafts taken back from running rows: counts fall, and recurrent states go on from the accepted token.

Flow:    a step's accepted drafts -> KVCacheManager.settle_drafts -> [DraftSettler] -> managers, BlockRegistrar
Source:  ARCHITECTURE.md, "The step plan"

Pages of attention need nothing: the tokens that follow are written over those of the rejected drafts, and nothing that
is read reaches behind the length of a request. A recurrent state cannot go back, so the step left one for each of its
last tokens; which block has the accepted one is a matter of the row's table alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.block_registrar import BlockRegistrar
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.step.step_builder import NO_UPDATE
from kvjax.core.step.step_plan import TableUpdate
from kvjax.core.tables.token_counts import as_counts


class DraftSettler:
    """Settles drafts of all groups and one request table. Owned by one `KVCacheManager`."""

    def __init__(
        self, groups: GroupManagers, rows: RowBlocks, registrar: BlockRegistrar, request_table: RequestTable
    ) -> None:
        self._groups = groups
        self._rows = rows
        self._registrar = registrar
        self._table = request_table

    def limit(self, rows: npt.ArrayLike, num_drafts: npt.ArrayLike) -> np.ndarray:
        """`KVCacheManager.limit_drafts`."""
        index = self._table.owned_rows(rows)[0]
        limits = np.broadcast_to(as_counts("num_drafts", num_drafts, index, least=0), index.shape)
        for manager in self._groups.rings:
            left = manager.tokens_left(index, self._table.num_computed_tokens[index])
            limits = np.where(left > 0, np.minimum(limits, left - 1), limits)
        return limits

    def settle(self, rows: npt.ArrayLike, num_rejected: npt.ArrayLike) -> tuple[TableUpdate, ...]:
        """`KVCacheManager.settle_drafts`."""
        index = self._table.owned_rows(rows)[0]
        counts = np.broadcast_to(as_counts("num_rejected", num_rejected, index, least=0), index.shape)
        if not index.size:
            return (NO_UPDATE,) * self._groups.num_groups
        kept = self._table.num_computed_tokens[index] - counts
        rejecting = counts.nonzero()[0]
        updates = self._take_back(index[rejecting], counts[rejecting])
        self._registrar.register_up_to(index, kept)
        return updates

    def _take_back(self, rows: np.ndarray, num_rejected: np.ndarray) -> tuple[TableUpdate, ...]:
        """Takes int64[n] tokens >= 1 of int64[n] rows back; per group the entries of its table that changed."""
        updates = [NO_UPDATE] * self._groups.num_groups
        if not rows.size:
            return tuple(updates)
        before = self._table.num_computed_tokens[rows]
        kept = before - num_rejected
        self._check_rejected(rows, before, kept)
        self._table.num_computed_tokens[rows] = kept
        for manager in self._groups.managers:
            held = manager.num_blocks[rows]
            changed_rows, columns, block_ids = manager.take_back(rows, before, kept)
            if changed_rows.size:
                for group_id, ids in zip(manager.group_ids, block_ids, strict=True):
                    updates[group_id] = TableUpdate(changed_rows, columns, ids)
                for row in rows[manager.num_blocks[rows] < held].tolist():
                    self._rows.note_idle(row)
        return tuple(updates)

    def _check_rejected(self, rows: np.ndarray, before: np.ndarray, kept: np.ndarray) -> None:
        """Raises ValueError unless int64[n] rows can go back from `before` to `kept` computed tokens."""
        if kept.min() < 1:
            i = int(kept.argmin())
            raise ValueError(
                f"row {rows[i]}: expected fewer rejected drafts than its {before[i]} computed tokens, got "
                f"{before[i] - kept[i]}"
            )
        for manager in self._groups.managers:
            cached = manager.num_cached_blocks[rows] * manager.block_size
            if (kept < cached).any():
                i = int((kept < cached).argmax())
                raise ValueError(
                    f"row {rows[i]}: expected rejected drafts behind the {cached[i]} tokens whose blocks are cached, "
                    f"got {before[i] - kept[i]} of {before[i]} computed tokens"
                )
            pages = manager.kv_cache_spec.state_pages
            if pages is not None and (before - kept).max() > pages.num_drafts:
                i = int((before - kept).argmax())
                raise ValueError(
                    f"row {rows[i]}, groups {manager.group_ids}: expected at most {pages.num_drafts} rejected drafts, "
                    f"as there are states for, got {before[i] - kept[i]}"
                )


__all__ = ["DraftSettler"]

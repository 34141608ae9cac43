"""Planned steps taken back: what they would have computed is no hit any more, and their page edits wait again.

Flow:    a step that is not dispatched -> KVCacheManager.take_back_step -> [StepTakeBack] -> pools, counts by row
Source:  ARCHITECTURE.md, "Planning a step"

Blocks are registered when a step is planned, so that requests of the same step may hit them. Which of them the step
would have filled follows from counts alone: those of a row's registered columns that are not full of tokens which are
computed, or came with the row's hit. A row with no computed tokens but its hit was admitted for this step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.pool.page_edits import NO_COPIES, NO_PAGES, PageCopies
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.tables.column_runs import Runs
from kvjax.errors import BlockStateError


class StepTakeBack:
    """Takes steps of one request table back over all groups. Owned by one `KVCacheManager`."""

    def __init__(self, groups: GroupManagers, rows: RowBlocks, request_table: RequestTable) -> None:
        self._groups = groups
        self._rows = rows
        self._table = request_table

    def take_back(
        self,
        rows: npt.ArrayLike,
        page_copies: Sequence[PageCopies] | None,
        pages_to_zero: Sequence[np.ndarray] | None,
    ) -> tuple[Request, ...]:
        """`KVCacheManager.take_back_step`."""
        index = self._table.owned_rows(rows)[0]
        pools = self._groups.pools
        copies = [NO_COPIES] * len(pools) if page_copies is None else page_copies
        page_ids = [NO_PAGES] * len(pools) if pages_to_zero is None else pages_to_zero
        if len(copies) != len(pools) or len(page_ids) != len(pools):
            raise ValueError(f"expected page edits of {len(pools)} pools, got {len(copies)} and {len(page_ids)}")
        computed, hit = self._table.num_computed_tokens[index], self._rows.num_hit_tokens[index]
        is_new = computed <= hit
        self._check_unshared(index, is_new)
        for manager in self._groups.cacheable:
            num_full, block_ids = self._unwritten(manager, index)
            manager.block_pool.evict_blocks(block_ids)
            manager.num_cached_blocks[index] = np.minimum(manager.num_cached_blocks[index], num_full)
        self._rows.keep_left_out(index)
        for row, num_tokens in zip(index[~is_new].tolist(), computed[~is_new].tolist(), strict=True):
            for manager in self._groups.managers:
                manager.move_back(row, num_tokens)
            self._rows.note_idle(row)
        new = [self._request_of(row) for row in index[is_new].tolist()]
        for request in reversed(new):
            self._rows.free(request.row)
            self._table.release(request)
            request.num_computed_tokens = 0
        for pool, of_copies, of_zeros in zip(pools, copies, page_ids, strict=True):
            pool.page_edits.put_back(of_copies, of_zeros)
        return tuple(new)

    def _unwritten(self, manager: SingleTypeKVCacheManager, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] columns of each row that are full of computed tokens, and int64[k] registered blocks behind."""
        written = np.maximum(self._table.num_computed_tokens[rows], self._rows.num_hit_tokens[rows])
        num_full = manager.full_column(rows, written)
        at = Runs.between(rows, num_full, manager.num_cached_blocks[rows]).entries()
        ids = manager.block_tables[:, *at].ravel().astype(np.int64)
        return num_full, manager.block_pool.prefix_index.hashed_of(ids)

    def _check_unshared(self, rows: np.ndarray, is_new: np.ndarray) -> None:
        """Raises BlockStateError if a block that the step was to fill is held by a row which stays, but for its own."""
        for manager in self._groups.cacheable:
            pool, new_rows = manager.block_pool, rows[is_new]
            held = np.bincount(manager.block_tables[:, new_rows].ravel(), minlength=pool.num_blocks)
            others = pool.ref_count - pool.outside_refs.counts - held
            for part, most in ((new_rows, 0), (rows[~is_new], 1)):
                _, ids = self._unwritten(manager, part)
                shared = ids[others[ids] > most]
                if shared.size:
                    raise BlockStateError(
                        f"block {shared[0]}, which the step was to fill, is a hit of another request, admitted since; "
                        "take that one back too, or free it first"
                    )

    def _request_of(self, row: int) -> Request:
        request = self._table.requests[row]
        assert request is not None  # the rows were checked
        return request


__all__ = ["StepTakeBack"]

"""One lookup in one manager's groups for a hit that may end inside a block.

Flow:    SubBlockHits.find -> [SubBlockScan] -> SubBlockIndex, SingleTypeKVCacheManager.cached_run -> tokens, blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.prefix_lookup import CachedStretch, HitScan
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.requests.request import Request


@final
class SubBlockScan(HitScan):
    """Columns from right to left: how far some cached block serves the column, and whether all before it are cached."""

    def __init__(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        block_hashes: Sequence[BlockHash],
        granularity: int,  # tokens of which a hit's length is a multiple
        needs_last_block: bool,
    ) -> None:
        self._manager = manager
        self._request = request
        self._hashes = block_hashes
        self._granularity = granularity
        self._needs_last_block = needs_last_block
        self._stretch = CachedStretch(block_hashes, manager.cached_run)
        self._column = len(block_hashes)  # of the hit's last token
        self._last: np.ndarray | None = None  # int32[G] its blocks; None: none is needed
        self._length: int | None = None

    def longest(self, max_length: int) -> int:
        """Tokens of the longest hit of at most `max_length` tokens."""
        if self._length is not None and self._length <= max_length:
            return self._length
        size = self._manager.block_size
        column = min((max_length - 1) // size, self._column)
        if not self._manager.forgets:
            missing = self._stretch.first_missing(0, column)
            column = column if missing is None else missing
        while column >= 0:
            edge = (column + 1) * size
            if self._sees_nothing(edge, max_length):
                return self._found(column, None, edge)
            last, end = self._reach(column, min(max_length, edge))
            if last is None:
                column -= 1
                continue
            first = min(self._manager.get_num_skipped_tokens(end) // size, column)
            missing = self._stretch.first_missing(first, column)
            if missing is None:
                return self._found(column, last, end)
            column = missing  # whose block is missing: it may still have a part
        return self._found(-1, None, 0)

    def ids(self) -> np.ndarray:  # int32[G, k]
        """Blocks of the last hit, the last one perhaps partly used, nulls before those that are needed."""
        if self._last is None:
            return np.zeros((self._manager.num_groups, self._column + 1), np.int32)
        ids = self._stretch.ids(self._manager.num_groups, self._column + 1)
        ids[:, -1] = self._last
        return ids

    def _found(self, column: int, last: np.ndarray | None, length: int) -> int:
        self._column, self._last, self._length = column, last, length
        return length

    def _sees_nothing(self, edge: int, limit: int) -> bool:
        """Whether a hit may end at the block edge `edge` with no block of the manager, as where a chunk begins."""
        if edge > limit or edge % self._granularity or self._needs_last_block:
            return False
        return self._manager.get_num_skipped_tokens(edge) == edge

    def _reach(self, column: int, limit: int) -> tuple[np.ndarray | None, int]:
        """int32[G] blocks that serve the most tokens of a column up to token `limit`, and where these end; or None."""
        start, index = column * self._manager.block_size, self._manager.sub_blocks
        assert index is not None  # the option is on
        for num_tokens, block_hash in index.find(self._request, self._hashes, column, limit - start):
            end = start + num_tokens
            end -= end % self._granularity
            if end <= start:  # the best come first: no later one reaches further
                break
            block = self._manager.cached_run([block_hash])
            if block.shape[1]:
                return block[:, 0], end
        return None, 0


__all__ = ["SubBlockScan"]

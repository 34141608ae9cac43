"""Kinds whose tokens see only the last part of a sequence: blocks before it are released, and no hit needs them.

Flow:    WindowManager, ChunkedLocalAttentionManager say which tokens are skipped -> [LocalAttentionManager]
Source:  vLLM v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np

from kvjax.core.kinds.positional import PositionalManager
from kvjax.core.kinds.prefix_lookup import CachedStretch, HitScan, PrefixLookup


@final
class LocalScan(HitScan):
    """Edges from right to left, one under test.

    A missing block rules out every edge whose stretch would contain it, so a failed probe moves the edge to that
    block: about one probe per window or chunk where little is cached. Where the next token sees no block, as at the
    start of a chunk, the edge is a hit, or rests on its last block if the lookup says so. Columns that a kind keeps at
    the start of a row are part of every hit: the first that is missing bounds it.
    """

    def __init__(self, manager: LocalAttentionManager, lookup: PrefixLookup) -> None:
        self._manager = manager
        self._lookup = lookup
        self._stretch = CachedStretch(lookup.block_hashes, manager.cached_run)
        self._edge = len(lookup.block_hashes)  # blocks of the hit
        self._kept: np.ndarray | None = None  # int32[G, k] leading blocks, of those that the manager keeps
        if manager.num_kept_columns:
            self._kept = manager.cached_run(lookup.block_hashes[: manager.num_kept_columns], manager.num_kept_columns)
            if self._kept.shape[1] < manager.num_kept_columns:
                self._edge = min(self._edge, self._kept.shape[1] - lookup.drop_last_block)

    def longest(self, max_length: int) -> int:
        """Tokens before the rightmost edge within the limit that is a hit."""
        lookup, size = self._lookup, self._manager.block_size
        dropped = int(lookup.drop_last_block)
        most = min(max_length // size, len(lookup.block_hashes)) - dropped
        edge = min(self._edge, most)
        while edge > 0:
            edge -= edge * size % lookup.alignment // size
            if not edge:
                break
            start = min(self._manager.get_num_skipped_tokens(edge * size) // size, edge)
            start -= lookup.needs_last_block and start == edge
            missing = self._stretch.first_missing(start, edge + dropped)
            if missing is None:
                break
            edge = min(edge - 1, missing - dropped)
        self._edge = max(edge, 0)
        return self._edge * size

    def ids(self) -> np.ndarray:  # int32[G, k]
        """Blocks of the stretch before the edge, nulls before them, and the blocks that are kept."""
        ids = self._stretch.ids(self._manager.num_groups, self._edge)
        if self._kept is not None:
            count = min(self._kept.shape[1], self._edge)
            ids[:, :count] = self._kept[:, :count]
        return ids


class LocalAttentionManager(PositionalManager):
    """Hits and common prefixes, from `get_num_skipped_tokens`."""

    hits_are_prefix_closed: ClassVar[bool] = False
    frees_skipped_blocks: ClassVar[bool] = True

    def start_scan(self, lookup: PrefixLookup) -> HitScan:
        """Right to left: the rightmost aligned edge before which every block is cached that the next token sees."""
        return LocalScan(self, lookup)

    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> list[int]:
        """None: a prefix is left behind."""
        return [0] * self.num_groups

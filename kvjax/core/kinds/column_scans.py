"""Lookups in groups whose columns are the request's own tokens: of all tokens, or of the last part of a sequence.

Flow:    PositionalManager.start_scan -> [WholePrefixScan | LocalScan] -> tokens, blocks
Source:  vLLM v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from typing import final

import numpy as np

from kvjax.core.kinds.prefix_lookup import CachedStretch, HitScan, PrefixLookup
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager


@final
class WholePrefixScan(HitScan):
    """The leading run of cached blocks, looked up once and cut as limits fall.

    Hashes are chained, so nothing after a miss can be of this prefix.
    """

    def __init__(self, manager: SingleTypeKVCacheManager, lookup: PrefixLookup) -> None:
        self._manager = manager
        self._lookup = lookup
        self._run: np.ndarray | None = None  # int32[G, k]
        self._num_blocks = 0

    def longest(self, max_length: int) -> int:
        """Tokens of the run within the limit, without the dropped block."""
        lookup, size = self._lookup, self._manager.block_size
        most = max_length // size
        if self._run is None:
            self._run = self._manager.cached_run(lookup.block_hashes, most)
        num_tokens = (min(self._run.shape[1], most) - lookup.drop_last_block) * size
        num_tokens = max(num_tokens - num_tokens % lookup.alignment, 0)
        self._num_blocks = num_tokens // size
        return num_tokens

    def ids(self) -> np.ndarray:  # int32[G, k]
        """The run's first blocks."""
        assert self._run is not None  # `longest` comes first
        return self._run[:, : self._num_blocks]


@final
class LocalScan(HitScan):
    """Edges from right to left, one under test.

    A missing block rules out every edge whose stretch would contain it, so a failed probe moves the edge to that
    block: about one probe per window or chunk where little is cached. Where the next token sees no block, as at the
    start of a chunk, the edge is a hit, or rests on its last block if the lookup says so. Columns that a kind keeps at
    the start of a row are part of every hit: the first that is missing bounds it.
    """

    def __init__(self, manager: SingleTypeKVCacheManager, lookup: PrefixLookup) -> None:
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


__all__ = ["LocalScan", "WholePrefixScan"]

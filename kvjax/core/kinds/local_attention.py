"""Kinds whose tokens see only the last part of a sequence: blocks before it are released, and no hit needs them.

Flow:    WindowManager, ChunkedLocalAttentionManager say which tokens are skipped -> [LocalAttentionManager]
Source:  vLLM v1/core/single_type_kv_cache_manager.py
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvjax.core.kinds.positional import PositionalManager
from kvjax.core.kinds.single_type_manager import PrefixLookup


class LocalAttentionManager(PositionalManager):
    """Hits and common prefixes, from `get_num_skipped_tokens`."""

    hits_are_prefix_closed: ClassVar[bool] = False
    gives_blocks_back: ClassVar[bool] = True

    def find_longest_cache_hit(self, lookup: PrefixLookup) -> np.ndarray:
        """Right to left: the rightmost aligned edge before which every block is cached that the next token sees.

        A missing block rules out every edge whose run would contain it, so a failed probe moves the edge to that
        block: about one probe per window or chunk where little is cached. Where the next token sees no block, as at
        the start of a chunk, the edge is a hit, or rests on its last block if the lookup says so.
        """
        dropped = int(lookup.drop_last_block)
        num_blocks = min(lookup.max_length // self.block_size, len(lookup.block_hashes))
        edge = num_blocks - dropped  # blocks of the hit under test
        while edge > 0:
            edge -= edge * self.block_size % lookup.alignment // self.block_size
            start = min(self.get_num_skipped_tokens(edge * self.block_size) // self.block_size, edge)
            start = max(start - (lookup.needs_last_block and start == edge), 0)
            end = edge + dropped
            run = self.cached_run(lookup.block_hashes[start:end])
            if run.shape[1] == end - start:
                return np.pad(run[:, : edge - start], ((0, 0), (start, 0)))
            edge = min(edge - 1, start + run.shape[1])
        return np.empty((self.num_groups, 0), np.int32)

    def get_num_common_prefix_blocks(self, row: int, num_running_requests: int) -> list[int]:
        """None: a prefix is left behind."""
        return [0] * self.num_groups

"""Lookups in groups of recurrent states: the last cached state suffices.

Flow:    RecurrentManager.start_scan -> [StateScan] -> tokens, blocks
Source:  vLLM v1/core/single_type_kv_cache_manager.py (MambaManager)
"""

from __future__ import annotations

from math import lcm
from typing import final

import numpy as np

from kvjax.core.kinds.prefix_lookup import HitScan, PrefixLookup
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager

FIRST_CHUNK, LAST_CHUNK = 32, 1_024  # columns that are looked up at once


@final
class StateScan(HitScan):
    """Columns at aligned lengths, looked up from right to left in chunks that double."""

    def __init__(self, manager: SingleTypeKVCacheManager, lookup: PrefixLookup) -> None:
        size = manager.block_size
        self._manager = manager
        self._lookup = lookup
        self._step = lcm(size, lookup.alignment) // size  # blocks from one length to the next
        self._hashes = lookup.block_hashes[self._step - 1 :: self._step] if manager.enable_caching else ()
        self._ids = np.zeros((manager.num_groups, 0), np.int32)  # of lengths first + 1 and on
        self._is_hit = np.zeros(0, np.bool_)
        self._first = self._place = len(self._hashes)
        self._chunk = FIRST_CHUNK

    def longest(self, max_length: int) -> int:
        """Tokens before the rightmost state within the limit."""
        size = self._manager.block_size
        num_blocks = min(max_length // size, len(self._lookup.block_hashes)) - self._lookup.drop_last_block
        most = num_blocks // self._step
        place = min(self._place, most)  # a hit of so many steps
        while place > 0:
            if place <= self._first:
                self._look_up(max(place - self._chunk, 0), place)
            hits = self._is_hit[: place - self._first].nonzero()[0]
            if hits.size:
                place = self._first + hits.item(-1) + 1
                break
            place = self._first
        self._place = max(place, 0)
        return self._place * self._step * size

    def _look_up(self, first: int, end: int) -> None:
        hashes, manager = self._hashes[first:end], self._manager
        self._ids = np.stack([manager.block_pool.find_each(hashes, group_id) for group_id in manager.group_ids])
        is_hit = self._ids > 0
        if not manager.settings.options.rules.defer_fresh_hits:
            is_hit &= ~manager.fresh_blocks.are_fresh(self._ids)
        self._is_hit = is_hit.all(axis=0)
        self._first, self._chunk = first, min(2 * self._chunk, LAST_CHUNK)

    def ids(self) -> np.ndarray:  # int32[G, k]
        """The state, nulls before it."""
        ids = np.zeros((self._manager.num_groups, self._place * self._step), np.int32)
        if self._place:
            ids[:, -1] = self._ids[:, self._place - self._first - 1]
        return ids


__all__ = ["StateScan"]

"""Lookups that may end inside a block: over the hashes of hash blocks, which are units.

Flow:    InnerKVCacheCoordinator -> [InnerRunScan | InnerStateScan] -> tokens, blocks
Source:  find_longest_cache_hit with fine-grained hashes, vLLM 0.33 v1/core/single_type_kv_cache_manager.py

The last block of a hit of L tokens is used in part where L is no multiple of the block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.kinds.prefix_lookup import HitScan
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.spec import cdiv

CHUNK = 256  # units that are looked up at once


def find_in_all(manager: SingleTypeKVCacheManager, hashes: Sequence[BlockHash]) -> np.ndarray:  # int32[G, n]
    """One block of every hash for each group, -1 in all groups where one has none."""
    pool = manager.block_pool
    ids = np.stack([pool.find_each(hashes, group_id) for group_id in manager.group_ids])
    return np.where((ids > 0).all(axis=0), ids, -1)


@final
class InnerRunScan(HitScan):
    """The leading run of full blocks, and as much of the next one as some block has; looked up once."""

    def __init__(
        self,
        manager: SingleTypeKVCacheManager,
        unit_hashes: Sequence[BlockHash],
        block_hashes: Sequence[BlockHash],  # at the manager's block size
        unit: int,
        drops_unit: bool,
    ) -> None:
        self._manager, self._unit, self._drops_unit = manager, unit, drops_unit
        self._unit_hashes, self._block_hashes = unit_hashes, block_hashes
        self._ids: np.ndarray | None = None  # int32[G, k]
        self._length = 0

    def longest(self, max_length: int) -> int:
        """Tokens within the limit, without the unit that is dropped."""
        if self._ids is None:
            self._look_up(max_length)
        self._length = min(self._length, max_length - max_length % self._unit)
        return self._length

    def ids(self) -> np.ndarray:  # int32[G, k]
        """The run's blocks, the last of them for its first tokens perhaps."""
        assert self._ids is not None  # `longest` comes first
        return self._ids[:, : cdiv(self._length, self._manager.block_size)]

    def _look_up(self, max_length: int) -> None:
        manager, unit, size = self._manager, self._unit, self._manager.block_size
        run = manager.cached_run(self._block_hashes, max_length // size)
        length, scale = run.shape[1] * size, size // unit
        first = run.shape[1] * scale
        last = min(first + scale - 1, max_length // unit, len(self._unit_hashes))
        if first < last:
            inside = find_in_all(manager, self._unit_hashes[first:last])
            found = (inside[0] > 0).nonzero()[0]
            if found.size:
                length = (first + found.item(-1) + 1) * unit
                run = np.concatenate([run, inside[:, found[-1:]]], axis=1)
        self._ids, self._length = run, max(length - unit * self._drops_unit, 0)


@final
class InnerStateScan(HitScan):
    """From right to left: the rightmost state at a multiple of the unit. None is dropped."""

    def __init__(self, manager: SingleTypeKVCacheManager, unit_hashes: Sequence[BlockHash], unit: int) -> None:
        self._manager, self._unit, self._hashes = manager, unit, unit_hashes
        self._place = len(unit_hashes)  # units of the hit
        self._state = np.zeros((manager.num_groups, 0), np.int32)

    def longest(self, max_length: int) -> int:
        """Tokens before the rightmost state within the limit."""
        end = min(self._place, max_length // self._unit)
        if end < self._place or not self._state.size:
            self._place = self._find_before(end)
        return self._place * self._unit

    def _find_before(self, end: int) -> int:
        while end > 0:
            first = max(end - CHUNK, 0)
            ids = find_in_all(self._manager, self._hashes[first:end])
            found = (ids[0] > 0).nonzero()[0]
            if found.size:
                self._state = ids[:, found[-1:]]
                return int(first + found.item(-1) + 1)
            end = first
        return 0

    def ids(self) -> np.ndarray:  # int32[G, k]
        """The state, nulls before it."""
        ids = np.zeros((self._manager.num_groups, cdiv(self._place * self._unit, self._manager.block_size)), np.int32)
        if self._place:
            ids[:, -1:] = self._state
        return ids


__all__ = ["InnerRunScan", "InnerStateScan"]

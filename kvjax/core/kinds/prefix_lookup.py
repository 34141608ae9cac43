"""One question to the prefix cache, and how far one manager got with it.

Flow:    coordinators -> [PrefixLookup] -> SingleTypeKVCacheManager.start_scan -> [HitScan] -> tokens, blocks
Source:  the hits are those of vLLM v1/core/single_type_kv_cache_manager.py

In a hybrid the managers are asked in turn for a hit that is no longer than what all others accept. So the limit of one
manager's lookup only falls. A scan goes on from where it stopped, and looks no block up twice: a lookup costs a few
microseconds for each question, and 0.1 us for each block, however often managers disagree.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash


@dataclass
class PrefixLookup:
    """One question to the prefix cache. Nobody writes to it; not frozen, since a lookup asks several."""

    block_hashes: Sequence[BlockHash]  # at the manager's block size
    max_length: int  # tokens; a hit is no longer
    alignment: int  # tokens; a hit's length is a multiple
    drop_last_block: bool  # EAGLE: the block after the hit must be cached too, and is computed again
    needs_last_block: bool = True  # whether the hit's last block must be cached even where the next token sees none


class HitScan(abc.ABC):
    """One lookup in one manager's groups. Good until anything is registered or evicted."""

    @abc.abstractmethod
    def longest(self, max_length: int) -> int:
        """Tokens of the longest hit of at most `max_length` tokens, which no call before has fallen below.

        The block that the lookup drops, if any, lies within `max_length` too.
        """

    @abc.abstractmethod
    def ids(self) -> np.ndarray:  # int32[G, k]
        """Blocks of the hit that `longest` found last, null where a block is not needed."""


class CachedStretch:
    """Neighbouring columns that are known to be cached in all groups, as a scan moves from right to left."""

    def __init__(
        self, block_hashes: Sequence[BlockHash], cached_run: Callable[[Sequence[BlockHash]], np.ndarray]
    ) -> None:
        """`cached_run` finds int32[G, k] blocks of the longest leading run of hashes that all groups have cached."""
        self._hashes = block_hashes
        self._cached_run = cached_run
        self._start = self._end = len(block_hashes)
        self._parts: list[tuple[int, np.ndarray]] = []  # first column, int32[G, k]: runs that were found

    def first_missing(self, start: int, end: int) -> int | None:
        """A column in [start, end) that is not cached, all between it and `start` are; None: all are.

        Neither bound is greater than at the call before, and `end` is no greater than a column found missing.
        """
        self._end = min(self._end, end)
        self._start = min(self._start, self._end)
        if start >= self._start:
            return None
        run = self._cached_run(self._hashes[start : self._start])
        self._parts.append((start, run))
        reached = start + run.shape[1]
        if reached < self._start:
            self._start, self._end = start, reached
            return reached
        self._start = start
        return None

    def ids(self, num_groups: int, num_columns: int) -> np.ndarray:  # int32[num_groups, num_columns]
        """Blocks of the stretch, nulls before it."""
        ids = np.zeros((num_groups, num_columns), np.int32)
        for start, run in self._parts:
            count = min(run.shape[1], num_columns - start)
            if count > 0:
                ids[:, start : start + count] = run[:, :count]
        return ids


__all__ = ["CachedStretch", "HitScan", "PrefixLookup"]

"""Under which salt, adapter and weight version each cached block was computed, so that they can be dropped together.

Flow:    SingleTypeKVCacheManager, StepPlanner register blocks -> [BlockOrigins] -> KVCacheManager.invalidate

A hash cannot tell what went into it, so a pool that is asked to remembers an origin per block: an int32 that numbers
the origins met, 4 bytes a block, and nothing where the option is off. Numbers of blocks that are not hashed mean
nothing. Origins that no hashed block has are forgotten when their number has doubled, so that there are never more
than twice as many as hashed blocks (and `MIN_ORIGINS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvjax.core.hashing.block_origin import BlockOrigin

MIN_ORIGINS = 1_024


class BlockOrigins:
    """Origins of the blocks of one pool, owned by it. Noting one costs about a microsecond."""

    def __init__(self, is_hashed: np.ndarray) -> None:
        self._is_hashed = is_hashed  # bool[num_blocks], the pool's
        self._number_of = np.zeros(is_hashed.size, np.int32)  # by block
        self._numbers: dict[BlockOrigin, int] = {}
        self._max_origins = MIN_ORIGINS

    def note(self, block_ids: np.ndarray, origin: BlockOrigin) -> None:
        """Blocks (int32[...], nulls among them or not) were registered for a request of that origin."""
        self._number_of[block_ids] = self._number(origin)

    def note_many(self, block_ids: np.ndarray, origins: Sequence[BlockOrigin]) -> None:
        """Blocks (int32[groups, n]) were registered for n requests, one of each group for each."""
        self._number_of[block_ids] = np.fromiter(map(self._number, origins), np.int32, len(origins))

    def find(self, predicate: Callable[[BlockOrigin], bool]) -> np.ndarray:  # int64[k], ascending
        """The hashed blocks of the origins that `predicate` holds for; it is asked once for each origin."""
        matching = [number for origin, number in self._live().items() if predicate(origin)]
        return np.flatnonzero(self._is_hashed & np.isin(self._number_of, matching))

    def distinct(self) -> list[BlockOrigin]:
        """The origins of hashed blocks, oldest first."""
        return list(self._live())

    def snapshot(self) -> dict[int, BlockOrigin]:
        """Origin by hashed block."""
        origins = {number: origin for origin, number in self._numbers.items()}
        return {block: origins[self._number_of.item(block)] for block in np.flatnonzero(self._is_hashed).tolist()}

    def _live(self) -> dict[BlockOrigin, int]:
        used = set(np.unique(self._number_of[self._is_hashed]).tolist())
        return {origin: number for origin, number in self._numbers.items() if number in used}

    def _number(self, origin: BlockOrigin) -> int:
        number = self._numbers.get(origin)
        if number is None:
            if len(self._numbers) >= self._max_origins:
                self._forget_unused()
            number = self._numbers[origin] = len(self._numbers)
        return number

    def _forget_unused(self) -> None:
        """Numbers the origins in use 0, 1, ... again."""
        live = self._live()
        renumbered = np.zeros(len(self._numbers), np.int32)
        renumbered[list(live.values())] = np.arange(len(live))
        self._number_of = renumbered[self._number_of]
        self._numbers = {origin: number for number, origin in enumerate(live)}
        self._max_origins = max(2 * len(live), MIN_ORIGINS)

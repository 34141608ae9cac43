"""What tiers keep: units, each the pages of one cached block, and what is to be done with them.

Flow:    TierScheduler -> [TierMeta: StoreUnits, CopyUnits, LoadUnits] -> TierWorker

A unit is right by itself: a full block of attention, a block of a window, a recurrent state. Its key is its group and
its block hash, which covers all tokens before it, the salt, the adapter and the version of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvjax.core import BlockHash
from kvjax.core.spec import KVCacheConfig


class UnitKey(NamedTuple):
    """Names a unit in every tier of one layout."""

    group_id: int
    block_hash: BlockHash


class StoreUnits(NamedTuple):
    """Pages of one group to be read before the next step."""

    group_id: int
    block_hashes: tuple[BlockHash, ...]
    block_ids: np.ndarray  # int32 of each, in the pool
    rank: int = 0  # data rank whose pool it is


class CopyUnits(NamedTuple):
    """Pages to be written from pages of the same pool, as they are before the next step."""

    load_id: int
    group_id: int
    sources: np.ndarray  # int32[n]
    destinations: np.ndarray  # int32[n]
    rank: int = 0  # of both


class LoadUnits(NamedTuple):
    """Pages of one group to be written from the host or a disk."""

    load_id: int
    group_id: int
    block_hashes: tuple[BlockHash, ...]
    slots: np.ndarray  # int32 of each, where the host has it; -1: on disk
    destinations: np.ndarray  # int32 of each, in the pool
    rank: int = 0  # data rank whose pool it is


class StoredUnits(NamedTuple):
    """What became of a `StoreUnits`, or of a part of one."""

    group_id: int
    block_hashes: tuple[BlockHash, ...]
    slots: np.ndarray  # int32 of each, held; -1: the host has no room
    is_good: np.ndarray  # bool of each: its bytes are where they should be


@dataclass(frozen=True)
class TierMeta:
    """All that a worker is to do before the next step: stores and copies read first, then loads write."""

    stores: tuple[StoreUnits, ...] = ()
    copies: tuple[CopyUnits, ...] = ()
    loads: tuple[LoadUnits, ...] = ()
    cancelled: tuple[int, ...] = ()  # loads that may write no more


NOTHING = TierMeta()


@dataclass(frozen=True)
class UnitSizes:
    """Which pool each group is in, and the bytes of a unit: a page in each array of the group's columns."""

    pool_of_group: tuple[int, ...]
    arrays_of_pool: tuple[tuple[int, ...], ...]  # bytes of a page in each array, columns in order
    num_arrays_of_group: tuple[int, ...]  # the first of its pool's
    blocks_of_pool: tuple[int, ...]

    @classmethod
    def of(cls, config: KVCacheConfig) -> UnitSizes:
        """Sizes of a deployment; without arrays where its pools have no columns."""
        pools = config.pools
        return cls(
            pool_of_group=tuple(group.pool_id for group in config.kv_cache_groups),
            arrays_of_pool=tuple(
                tuple(array.page_bytes for column in pool.columns for array in column.arrays) for pool in pools
            ),
            num_arrays_of_group=tuple(
                sum(len(column.arrays) for column in pools[group.pool_id].columns[: len(group.layer_names)])
                for group in config.kv_cache_groups
            ),
            blocks_of_pool=tuple(pool.num_blocks for pool in pools),
        )

    def unit_bytes(self, group_id: int) -> int:
        """Bytes of one unit of a group."""
        arrays = self.arrays_of_pool[self.pool_of_group[group_id]]
        return sum(arrays[: self.num_arrays_of_group[group_id]])

    def units_in(self, num_bytes: int) -> tuple[int, ...]:
        """Units of each pool that so many bytes hold, in the proportions of the pools."""
        total = sum(count * sum(arrays) for count, arrays in zip(self.blocks_of_pool, self.arrays_of_pool, strict=True))
        return tuple(num_bytes * count // total if total else 0 for count in self.blocks_of_pool)


__all__ = [
    "NOTHING",
    "CopyUnits",
    "LoadUnits",
    "StoreUnits",
    "StoredUnits",
    "TierMeta",
    "UnitKey",
    "UnitSizes",
]

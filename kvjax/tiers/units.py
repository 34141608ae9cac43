"""What tiers keep: units, each the pages of one cached block, and what is to be done with them.

Flow:    TierScheduler -> [TierMeta: StoreUnits, CopyUnits, LoadUnits] -> TierWorker

A unit is right by itself: a full block of attention, a block of a window, a recurrent state. Its key is its group and
its block hash, which covers all tokens before it, the salt, the adapter and the version of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvjax.core import BlockHash
from kvjax.core.spec import KVCacheConfig


class UnitKey(NamedTuple):
    """Names a unit in every tier of one layout."""

    group_id: int
    block_hash: BlockHash


class UnitWorth(NamedTuple):
    """What decides how long a unit is kept."""

    on_probation: bool = False  # as `kvjax.core.kinds.probation` says
    last_used: int = 0  # by the host's clock


LASTING = UnitWorth()


class StoreUnits(NamedTuple):
    """Pages of one group to be read before the next step."""

    group_id: int
    block_hashes: tuple[BlockHash, ...]
    block_ids: np.ndarray  # int32 of each, in the pool
    rank: int = 0  # data rank whose pool it is
    on_probation: bool = False  # all of them are


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

    def digest(self) -> bytes:
        """A hash of all of it."""
        found = hashlib.blake2b(digest_size=16)
        units: tuple[tuple[object, ...], ...] = (*self.stores, *self.copies, *self.loads, self.cancelled)
        for one in units:
            for value in one:
                found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return found.digest()


NOTHING = TierMeta()


@dataclass(frozen=True)
class UnitSizes:
    """Which pool each group is in, and the bytes of a unit: a page in each array of the group's columns.

    Where several processes share the pages, arrays are the parts of them that one process has, and `bytes_of_group`
    what the process with most of a unit has: by this all of them cut and count alike.
    """

    pool_of_group: tuple[int, ...]
    arrays_of_pool: tuple[tuple[int, ...], ...]  # bytes of a page in each array, columns in order
    num_arrays_of_group: tuple[int, ...]  # the first of its pool's
    bytes_of_group: tuple[int, ...]  # of one unit

    @classmethod
    def of(cls, config: KVCacheConfig) -> UnitSizes:
        """Sizes of a deployment; without arrays where its pools have no columns."""

        def page_bytes(pool_id: int, column: int, array: int) -> list[int]:
            return [config.pools[pool_id].columns[column].arrays[array].page_bytes]

        return cls.of_parts(config, page_bytes)

    @classmethod
    def of_parts(cls, config: KVCacheConfig, part_bytes: Callable[[int, int, int], Sequence[int]]) -> UnitSizes:
        """Sizes where `part_bytes(pool, column, array)` are kept of a page, one after another."""
        arrays = [
            [
                [part_bytes(pool_id, place, i) for i in range(len(column.arrays))]
                for place, column in enumerate(pool.columns)
            ]
            for pool_id, pool in enumerate(config.pools)
        ]
        own = [
            list(chain(*chain(*arrays[group.pool_id][: len(group.layer_names)]))) for group in config.kv_cache_groups
        ]
        return cls(
            pool_of_group=tuple(group.pool_id for group in config.kv_cache_groups),
            arrays_of_pool=tuple(tuple(chain(*chain(*columns))) for columns in arrays),
            num_arrays_of_group=tuple(map(len, own)),
            bytes_of_group=tuple(map(sum, own)),
        )

    def unit_bytes(self, group_id: int) -> int:
        """Bytes of one unit of a group."""
        return self.bytes_of_group[group_id]

    def units_in(self, num_bytes: int, pool_id: int) -> int:
        """Most units of one pool that so many bytes hold; 0 where the pool has no arrays."""
        groups = [group_id for group_id, of in enumerate(self.pool_of_group) if of == pool_id]
        smallest = min(map(self.unit_bytes, groups), default=0)
        return num_bytes // smallest if smallest else 0


__all__ = [
    "LASTING",
    "NOTHING",
    "CopyUnits",
    "LoadUnits",
    "StoreUnits",
    "StoredUnits",
    "TierMeta",
    "UnitKey",
    "UnitSizes",
    "UnitWorth",
]

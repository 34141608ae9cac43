"""Units in host memory: which slot holds which, and which slot is used next.

Flow:    TierWorker, pages that arrived -> [HostStore] -> slots; TierScheduler.holds -> [HostStore]

The slots of a pool are a `BlockPool` of their own: a slot is held while it is written or read, else free, and a free
slot with a hash is found until an eviction policy gives it to another unit. With "lru" slots without a hash are used
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvjax.core import BlockHash
from kvjax.core.pool.block_pool import BlockPool
from kvjax.tiers.units import UnitKey, UnitSizes


class HostStore:
    """Slots of all pools, and their bytes. Its index belongs to the scheduler's thread; bytes of held slots to whoever
    holds them.
    """

    def __init__(
        self,
        num_units: Sequence[int],  # per pool; 0: none of its blocks are kept
        sizes: UnitSizes,
        eviction_policy: str = "lru",
        *,
        has_bytes: bool = True,  # False: only which unit would be where
    ) -> None:
        self.num_units = tuple(num_units)
        self._sizes = sizes
        self._policy = eviction_policy
        self._pools = [self._make_pool(pool_id) for pool_id in range(len(num_units))]
        # Per pool and array uint8[slots, bytes of a page]; slot 0 is the null block. Committed where it is written.
        self.buffers = tuple(
            tuple(np.empty((count + 1, size), np.uint8) for size in arrays) if has_bytes and count else ()
            for count, arrays in zip(num_units, sizes.arrays_of_pool, strict=True)
        )

    @property
    def num_stored(self) -> int:
        """Units that can be found."""
        return sum(pool.num_hashed_blocks for pool in self._pools if pool is not None)

    @property
    def num_held(self) -> int:
        """Slots that are being written or read."""
        return sum(pool.num_usable_blocks - pool.num_free_blocks for pool in self._pools if pool is not None)

    def find(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # int32[n]
        """The slot of each unit, -1 where there is none."""
        pool = self._pool_of(group_id)
        if pool is None or not pool.num_hashed_blocks:
            return np.full(len(block_hashes), -1, np.int32)
        return pool.find_each(block_hashes, group_id)

    def take(self, group_id: int, count: int) -> np.ndarray:  # int32[<= count]
        """Holds slots for new units, as many as there are; other units lose theirs."""
        pool = self._pool_of(group_id)
        return np.zeros(0, np.int32) if pool is None else pool.get_new_blocks(min(count, pool.num_free_blocks))

    def put(self, group_id: int, slots: np.ndarray, block_hashes: Sequence[BlockHash]) -> None:
        """Held slots have been written: their units can be found, and are evicted last, in this order."""
        pool = self._pools[self._sizes.pool_of_group[group_id]]
        assert pool is not None  # it gave the slots
        pool.register_many(slots, block_hashes, group_id)
        pool.free_blocks(slots)

    def hold(self, group_id: int, slots: np.ndarray) -> None:
        """Keeps units where they are while they are read."""
        pool = self._pool_of(group_id)
        if pool is not None:
            pool.touch(slots)

    def let_go(self, group_id: int, slots: np.ndarray, *, forget: bool = False) -> None:
        """Ends a hold; with `forget` units that nobody else holds are given up."""
        pool = self._pool_of(group_id)
        if pool is None or not slots.size:
            return
        if forget:
            pool.evict_blocks(slots[pool.ref_count[slots] == 1])
        pool.free_blocks(slots[::-1])

    def let_go_others(self, held: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Ends all holds but those of (group, slots): of whoever cannot end them any more."""
        kept = [np.zeros(count + 1, np.int64) for count in self.num_units]
        for group_id, slots in held:
            np.add.at(kept[self._sizes.pool_of_group[group_id]], slots, 1)
        for pool, counts in zip(self._pools, kept, strict=True):
            if pool is not None:
                pool.free_blocks(np.repeat(np.arange(pool.num_blocks), pool.ref_count - counts))

    def clear(self) -> None:
        """Forgets all units and all holds. Nobody may be writing or reading."""
        self._pools = [self._make_pool(pool_id) for pool_id in range(len(self.num_units))]

    def keys(self) -> list[UnitKey]:
        """All units that can be found, those evicted first first, held ones behind."""
        found = []
        for pool in self._pools:
            if pool is None:
                continue
            free = pool.eviction_policy.order()
            held = np.flatnonzero(pool.ref_count)
            for slot in [*free.tolist(), *held.tolist()]:
                block_hash = pool.block_hash_of(slot)
                if block_hash is not None:
                    found.append(UnitKey(pool.group_of(slot), block_hash))
        return found

    def check_invariants(self) -> None:
        """Checks the laws of each pool's slots.

        Raises:
            InvariantError: one does not hold.
        """
        for pool in self._pools:
            if pool is not None:
                pool.check_invariants()

    def _pool_of(self, group_id: int) -> BlockPool | None:
        return self._pools[self._sizes.pool_of_group[group_id]]

    def _make_pool(self, pool_id: int) -> BlockPool | None:
        groups = [group_id for group_id, of in enumerate(self._sizes.pool_of_group) if of == pool_id]
        if not self.num_units[pool_id] or not groups:
            return None
        return BlockPool(
            self.num_units[pool_id] + 1,
            group_ids=groups,
            eviction_policy=self._policy,
            free_order="uncached_first" if self._policy == "lru" else "append",
        )


__all__ = ["HostStore"]

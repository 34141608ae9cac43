"""Units in host memory: which slot holds which, and whose bytes are used next.

Flow:    TierWorker, pages that arrived -> [HostStore] -> slots; TierScheduler.holds -> [HostStore]

All pools share the bytes: there is one order over the units of all kinds, and a kind has what its units are worth. A
slot is a row of its pool's memory (`HostRows`). While bytes are missing for new units, others lose theirs:

    on probation    of which nobody knows that a hit will use them; the first to come goes first
    lasting         all others, in the order of an eviction policy; "lru": of their last use in pool or host

Units on probation take no bytes of lasting ones. One that is read is lasting from then on.

A `BlockPool` is the index. Its blocks are the slots of all pools, one pool after another: those that hold a lasting
unit and are neither written nor read are free there.

Invariants (`check_invariants`):

    H1  the bytes of all used slots and the free ones are `max_bytes`
    H2  the index has one reference of every slot that is not used or on probation, and those of holds
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvjax.core import BlockHash
from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import InvariantError
from kvjax.tiers.stores.host_rows import HostRows
from kvjax.tiers.stores.last_used_policy import LastUsedPolicy
from kvjax.tiers.units import UnitKey, UnitSizes, UnitWorth


class HostStore:
    """Slots of all pools, and their bytes. Its index belongs to the scheduler's thread; bytes of held slots to whoever
    holds them.
    """

    def __init__(
        self,
        max_bytes: int,
        sizes: UnitSizes,
        eviction_policy: str = "lru",
        *,
        has_bytes: bool = True,  # False: only which unit would be where
    ) -> None:
        """An empty store. The index takes some 100 bytes for each unit of the smallest kinds that there is room for."""
        self.max_bytes = max_bytes
        self._sizes = sizes
        self._policy = eviction_policy
        self._has_bytes = has_bytes
        self.clock = 0  # grows with every request that is looked up
        self.clear()

    def clear(self) -> None:
        """Forgets all units and all holds. Nobody may be writing or reading."""
        sizes = self._sizes
        counts = [sizes.units_in(self.max_bytes, pool_id) for pool_id in range(len(sizes.arrays_of_pool))]
        self._rows = tuple(
            HostRows(count, arrays, has_bytes=self._has_bytes)
            for count, arrays in zip(counts, sizes.arrays_of_pool, strict=True)
        )
        # Per pool and array uint8[slots, bytes of a page]. Committed where it is written.
        self.buffers = tuple(rows.arrays for rows in self._rows)
        self._offsets = np.cumsum([0, *counts[:-1]])  # slot s of a pool is the index's block offset + s, s >= 1
        policy = LastUsedPolicy if self._policy == "lru" else self._policy
        groups = range(len(sizes.pool_of_group))
        self._index = BlockPool(max(sum(counts), 1) + 1, group_ids=groups, eviction_policy=policy)
        self._index.take_for_good(self._index.num_free_blocks)
        own = self._index.eviction_policy
        self._last_used = (
            own.last_used if isinstance(own, LastUsedPolicy) else np.zeros(self._index.num_blocks, np.int64)
        )
        self._bytes_of = np.zeros(self._index.num_blocks, np.int64)  # 0: the slot is not used
        self._free_bytes = self.max_bytes
        self._probation: dict[int, None] = {}  # blocks of the index that nobody holds, first come first

    @property
    def num_stored(self) -> int:
        """Units that can be found."""
        return self._index.num_hashed_blocks

    @property
    def num_held(self) -> int:
        """Slots that are being written or read."""
        return sum(rows.num_used for rows in self._rows) - self._index.num_free_blocks - len(self._probation)

    def find(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # int32[n]
        """The slot of each unit, -1 where there is none."""
        if not self._index.num_hashed_blocks:
            return np.full(len(block_hashes), -1, np.int32)
        ids = self._index.find_each(block_hashes, group_id)
        return np.where(ids < 0, -1, ids - self._offset(group_id)).astype(np.int32)

    def takes(self, group_id: int, *, on_probation: bool) -> bool:
        """Whether there is room for a unit of the group, or could be."""
        return not on_probation or bool(self._probation) or self._sizes.unit_bytes(group_id) <= self._free_bytes

    def take(self, group_id: int, count: int, *, on_probation: bool = False) -> np.ndarray:  # int32[<= count]
        """Holds slots for new units, as many as there are; other units lose theirs."""
        size, rows = self._sizes.unit_bytes(group_id), self._rows[self._sizes.pool_of_group[group_id]]
        if not rows.num_rows or size > self.max_bytes:
            return np.zeros(0, np.int32)
        self._make_room(count * size, on_probation)
        slots = rows.take(min(count, self._free_bytes // size))
        self._bytes_of[slots + self._offset(group_id)] = size
        self._free_bytes -= slots.size * size
        self._give_back_memory()
        return slots

    def put(
        self, group_id: int, slots: np.ndarray, block_hashes: Sequence[BlockHash], worths: Sequence[UnitWorth]
    ) -> None:
        """Held slots have been written: their units can be found, and are evicted by what they are worth."""
        ids = self._ids(group_id, slots)
        self._index.register_many(ids, block_hashes, group_id)
        self._last_used[ids] = [worth.last_used for worth in worths]
        on_probation = np.array([worth.on_probation for worth in worths], bool)
        self._probation.update(dict.fromkeys(ids[on_probation].tolist()))
        self._index.free_blocks(ids[~on_probation])

    def hold(self, group_id: int, slots: np.ndarray) -> None:
        """Keeps units where they are while they are read."""
        ids = self._ids(group_id, slots)
        others = [block_id for block_id in ids.tolist() if block_id not in self._probation]
        for block_id in ids.tolist():
            self._probation.pop(block_id, None)  # the reader has its reference from now on
        self._index.touch(others)
        self._last_used[ids] = self.clock

    def use(self, group_id: int, slots: np.ndarray) -> None:
        """Units have been used elsewhere: they are lasting, and evicted last."""
        self.hold(group_id, slots)
        self.let_go(group_id, slots)

    def let_go(self, group_id: int, slots: np.ndarray, *, forget: bool = False) -> None:
        """Ends a hold; slots without a unit are free then, and with `forget` those that nobody else holds."""
        ids = self._ids(group_id, slots)
        ends = self._index.ref_count[ids] == 1
        if not forget:
            ends &= ~self._index.is_hashed[ids]
        self._give(ids[ends])
        self._index.free_blocks(ids[~ends][::-1])

    def let_go_others(self, held: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Ends all holds but those of (group, slots): of whoever cannot end them any more."""
        kept = np.zeros(self._index.num_blocks, np.int64)
        kept[list(self._probation)] = 1
        for group_id, slots in held:
            np.add.at(kept, self._ids(group_id, np.array(slots, np.int32)), 1)
        kept[(self._bytes_of == 0) | (~self._index.is_hashed & (kept == 0))] += 1  # those that are free in the end
        self._index.free_blocks(np.repeat(np.arange(kept.size), np.maximum(self._index.ref_count - kept, 0)))
        self._give(np.flatnonzero((self._bytes_of > 0) & ~self._index.is_hashed & (self._index.ref_count == 1)))

    def keys(self) -> list[UnitKey]:
        """All units that can be found, those evicted first first, held ones behind."""
        order = [*self._probation, *self._index.eviction_policy.order().tolist()]
        held = self._index.is_hashed.copy()
        held[order] = False
        contents = self._index.prefix_index.contents_of(np.array([*order, *np.flatnonzero(held)], np.int64))
        return [UnitKey(group_id, block_hash) for block_hash, group_id in zip(*contents, strict=True)]

    def check_invariants(self) -> None:
        """Checks the index, H1 and H2.

        Raises:
            InvariantError: one does not hold.
        """
        self._index.check_invariants()
        used = int(self._bytes_of.sum())
        if used + self._free_bytes != self.max_bytes or self._free_bytes < 0:
            raise InvariantError(f"H1: {used} bytes used and {self._free_bytes} free of {self.max_bytes}")
        is_kept = self._bytes_of == 0
        is_kept[list(self._probation)] = True
        wrong = np.flatnonzero(is_kept & (self._index.ref_count != 1))[1:]  # not the null block
        if wrong.size or not self._index.is_hashed[list(self._probation)].all():
            raise InvariantError(f"H2: slots {wrong} are held and not used, or one on probation has no unit")

    def _offset(self, group_id: int) -> int:
        return self._offsets.item(self._sizes.pool_of_group[group_id])

    def _ids(self, group_id: int, slots: np.ndarray) -> np.ndarray:  # int64[n]
        return slots.astype(np.int64) + self._offset(group_id)

    def _make_room(self, num_bytes: int, on_probation: bool) -> None:
        """Evicts units until so many bytes are free, as far as there are any that may go."""
        largest = max(self._sizes.bytes_of_group)
        while (missing := num_bytes - self._free_bytes) > 0:
            ids = self._next(-(-missing // largest), on_probation)  # no fewer are enough
            if not ids.size:
                return
            self._give(ids)

    def _next(self, count: int, on_probation: bool) -> np.ndarray:  # int64[<= count]
        """The blocks of the units that go next, taken out of the order; of those on probation alone, or of all."""
        ids = [block_id for block_id, _ in zip(self._probation, range(count), strict=False)]
        for block_id in ids:
            del self._probation[block_id]
        if on_probation or len(ids) == count:
            return np.array(ids, np.int64)
        others = self._index.get_new_blocks(min(count - len(ids), self._index.num_free_blocks))
        return np.concatenate([np.array(ids, np.int64), others])

    def _give(self, ids: np.ndarray) -> None:
        """Blocks with one reference, which stays, lose their units; their slots are not used any more."""
        if not ids.size:
            return
        self._index.evict_blocks(ids)
        self._free_bytes += int(self._bytes_of[ids].sum())
        self._bytes_of[ids] = 0
        pools = np.searchsorted(self._offsets, ids, side="left") - 1
        for pool_id in np.unique(pools).tolist():
            self._rows[pool_id].give((ids[pools == pool_id] - self._offsets[pool_id]).tolist())

    def _give_back_memory(self) -> None:
        """Gives back the memory of rows that nobody uses, where it is more than the bytes that are free."""
        for rows in self._rows:
            if sum(each.warm_bytes for each in self._rows) > self._free_bytes:
                rows.cool()


__all__ = ["HostStore"]

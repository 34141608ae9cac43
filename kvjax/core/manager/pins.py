"""Prefixes that stay in the cache until they are let go: their blocks are held outside every block table.

Flow:    KVCacheManager.pin(request) -> [Pins] -> PinnedPrefix; its blocks are never dealt until unpin
Source:  ARCHITECTURE.md, "Pins"; for system prompts, and prompts that the samples of a training step share

A pin takes blocks from what requests can have, so one is refused that would leave a pool less than the longest request
needs (and, with reserve=True, less than the running requests have reserved).

Invariant (`check_invariants`):

    N1  a block's references outside block tables are those of pins and of planned page copies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash
    from kvjax.core.manager.coordinator import Hit, KVCacheCoordinator


@dataclass(frozen=True)
class PinnedPrefix:
    """A prefix that `pin` holds, for `unpin`."""

    pin_id: int
    num_tokens: int  # of the hit that stays
    block_ids: tuple[tuple[int, ...], ...]  # per group, 0 where no block is needed


class Pins:
    """The pinned blocks of one coordinator, which owns it."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        self._coordinator = coordinator
        self._block_ids: dict[int, tuple[tuple[int, ...], ...]] = {}  # pin -> per group
        self._num_made = 0

    def find(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> Hit:
        """The hit that a longer request than these tokens would get, with the blocks that EAGLE drops from it."""
        coordinator = self._coordinator
        hits, length = coordinator.find_longest_cache_hit(block_hashes, num_tokens)
        blocks = list(hits)
        for manager, drops in zip(coordinator.managers, coordinator.drops_last_block, strict=True):
            if length and drops and manager.is_prefix_cacheable:
                column = length // manager.block_size
                dropped = coordinator.hashing.of_block_size(block_hashes, manager.block_size)[column : column + 1]
                for group_id in manager.group_ids:
                    block = manager.block_pool.find_run(dropped, group_id)
                    blocks[group_id] = np.concatenate([hits[group_id], block])
        return tuple(blocks), length

    def add(self, block_ids: tuple[tuple[int, ...], ...], num_tokens: int, longest_request: int) -> PinnedPrefix:
        """Holds the blocks that are not null, free ones included.

        Raises:
            OutOfBlocksError: a pool would be left with less than it needs. Nothing is changed.
        """
        by_pool = self._by_pool(block_ids)
        self._check_room(by_pool, longest_request)
        for pool, ids in zip(self._coordinator.pools, by_pool, strict=True):
            pool.touch(ids)
            pool.num_outside_refs[ids] += 1
        prefix = PinnedPrefix(self._num_made, num_tokens, block_ids)
        self._num_made += 1
        self._block_ids[prefix.pin_id] = block_ids
        return prefix

    def remove(self, prefix: PinnedPrefix) -> None:
        """Lets the blocks go, the last first.

        Raises:
            BlockStateError: the prefix is not pinned here. Nothing is changed.
        """
        if self._block_ids.get(prefix.pin_id) != prefix.block_ids:
            raise BlockStateError(
                f"expected a prefix that is pinned here, got pin {prefix.pin_id}: unpinned before, or another manager's"
            )
        del self._block_ids[prefix.pin_id]
        for pool, ids in zip(self._coordinator.pools, self._by_pool(prefix.block_ids), strict=True):
            pool.num_outside_refs[ids] -= 1
            pool.free_held(ids[::-1])

    def snapshot(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Per pin and group the blocks that it holds."""
        return dict(self._block_ids)

    def check_invariants(self) -> None:
        """Raises InvariantError if N1 does not hold."""
        pinned = [self._by_pool(block_ids) for block_ids in self._block_ids.values()]
        for pool_id, pool in enumerate(self._coordinator.pools):
            ids = np.concatenate([pool.page_edits.held_sources, *(by_pool[pool_id] for by_pool in pinned)])
            if not np.array_equal(np.bincount(ids, minlength=pool.num_blocks), pool.num_outside_refs):
                raise InvariantError(f"N1: pool {pool_id}: pins and copies hold {sorted(ids.tolist())}")

    def _by_pool(self, block_ids: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
        """Per pool int64[k] the blocks that are not null, distinct, since no two groups have one in common."""
        found: list[list[int]] = [[] for _ in self._coordinator.pools]
        for group_id, ids in enumerate(block_ids):
            manager, _ = self._coordinator.place_of_group(group_id)
            found[self._coordinator.pools.index(manager.block_pool)] += [block_id for block_id in ids if block_id]
        return [np.array(ids, np.int64) for ids in found]

    def _check_room(self, by_pool: list[np.ndarray], longest_request: int) -> None:
        reservations = self._coordinator.reservations
        for pool_id, least in enumerate(self._coordinator.worst_case_blocks(longest_request)):
            pool = self._coordinator.pools[pool_id]
            num_more = int(np.count_nonzero(pool.num_outside_refs[by_pool[pool_id]] == 0))
            left = pool.num_usable_blocks - int(np.count_nonzero(pool.num_outside_refs)) - num_more
            reserved = 0 if reservations is None else reservations.totals[pool_id]
            if num_more and left < max(least, reserved):
                raise OutOfBlocksError(
                    f"pinning {num_more} blocks leaves {left} of pool {pool_id}; a request of {longest_request} tokens "
                    f"may need {least}, running requests have reserved {reserved}: unpin a prefix, or give a shorter "
                    "longest_request"
                )


__all__ = ["PinnedPrefix", "Pins"]

"""Prefixes that stay in the cache until they are let go: their blocks are held outside every block table.

Flow:    KVCacheManager.pin(request) -> [Pins] -> PinnedPrefix; its blocks are never reused until unpin
Source:  ARCHITECTURE.md, "Admission by worst case"

Pins serve system prompts, and prompts that the samples of a training step share.

A pin takes blocks from what requests can have, so one is refused that would leave a pool less than the longest request
needs (and, with reserve=True, less than the running requests have reserved).

Invariant (`check_invariants`):

    N1  a block's references outside block tables are those of pins, of planned page copies, and those that were lent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.block_needs import BlockNeeds
from kvjax.core.manager.reservations import Reservations
from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError


@dataclass(frozen=True)
class PinnedPrefix:
    """A prefix that `pin` holds, for `unpin`."""

    pin_id: int
    num_tokens: int  # of the hit that stays
    block_ids: tuple[tuple[int, ...], ...]  # per group, 0 where no block is needed


class Pins:
    """The pinned blocks of one `KVCacheManager`, which owns it."""

    def __init__(self, groups: GroupManagers, needs: BlockNeeds, reservations: Reservations | None) -> None:
        self._groups = groups
        self._needs = needs
        self._reservations = reservations
        self._block_ids: dict[int, tuple[tuple[int, ...], ...]] = {}  # pin -> per group
        self._num_made = 0

    def add(self, hits: Sequence[np.ndarray], num_tokens: int, longest_request: int) -> PinnedPrefix:
        """Holds int32[k] blocks of a hit per group, free ones included; nulls are passed over.

        Raises:
            OutOfBlocksError: a pool would be left with less than it needs. Nothing is changed.
        """
        block_ids = tuple(tuple(ids.tolist()) for ids in hits)
        by_pool = self._groups.by_pool(block_ids)
        self._check_room(by_pool, longest_request)
        for pool, ids in zip(self._groups.pools, by_pool, strict=True):
            pool.touch(ids)
            pool.outside_refs.add(ids)
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
        for pool, ids in zip(self._groups.pools, self._groups.by_pool(prefix.block_ids), strict=True):
            pool.outside_refs.drop(ids)
            pool.free_held(ids[::-1])

    def snapshot(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Per pin and group the blocks that it holds."""
        return dict(self._block_ids)

    def check_invariants(self) -> None:
        """Raises InvariantError if N1 does not hold."""
        pinned = [self._groups.by_pool(block_ids) for block_ids in self._block_ids.values()]
        for pool_id, pool in enumerate(self._groups.pools):
            ids = np.concatenate([pool.page_edits.held_sources, *(by_pool[pool_id] for by_pool in pinned)])
            held = np.bincount(ids, minlength=pool.num_blocks) + pool.outside_refs.lent
            if not np.array_equal(held, pool.outside_refs.counts):
                raise InvariantError(f"N1: pool {pool_id}: pins and copies hold {sorted(ids.tolist())}")

    def _check_room(self, by_pool: list[np.ndarray], longest_request: int) -> None:
        for pool_id, least in enumerate(self._needs.worst_case(longest_request)):
            pool = self._groups.pools[pool_id]
            num_more = int(np.count_nonzero(pool.outside_refs.counts[by_pool[pool_id]] == 0))
            left = pool.num_usable_blocks - pool.outside_refs.num_blocks - num_more
            reserved = 0 if self._reservations is None else self._reservations.totals[pool_id]
            if num_more and left < max(least, reserved):
                raise OutOfBlocksError(
                    f"pinning {num_more} blocks leaves {left} of pool {pool_id}; a request of {longest_request} tokens "
                    f"may need {least}, running requests have reserved {reserved}: unpin a prefix, or give a shorter "
                    "longest_request"
                )


__all__ = ["PinnedPrefix", "Pins"]

"""Groups side by side: one manager per group, one pool per space of block ids, one answer per request.

Flow:    KVCacheManager -> [KVCacheCoordinator] -> SingleTypeKVCacheManager per group -> BlockPool per pool
Source:  vLLM v1/core/kv_cache_coordinator.py; fixed point of hits: ARCHITECTURE.md, "Hybrid hits"

Groups of equal spec in one pool form a *family*: they are looked up together and always hold equally many blocks.
Order is the order of groups everywhere: in dealing ids, in releases, in registration.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from kvjax.core.block_hash import BlockHashListWithBlockSize
from kvjax.core.block_pool import BlockPool
from kvjax.core.fresh_blocks import FreshBlocks
from kvjax.core.kinds.registry import manager_class_of
from kvjax.core.kv_cache_blocks import NO_BLOCK_IDS
from kvjax.core.single_type_manager import ManagerSettings, PrefixLookup, SingleTypeKVCacheManager
from kvjax.core.spec import KVCacheConfig
from kvjax.errors import InvariantError

if TYPE_CHECKING:
    from kvjax.core.block_hash import BlockHash
    from kvjax.core.request import Request

Hit = tuple[tuple[np.ndarray, ...], int]  # per group int32[k] ids, and the hit's tokens


@dataclass(frozen=True)
class GroupFamily:
    """Groups of equal spec in one pool."""

    group_ids: tuple[int, ...]
    managers: tuple[SingleTypeKVCacheManager, ...]

    @property
    def block_size(self) -> int:
        """Tokens a block, on all ranks of context parallelism together."""
        return self.managers[0].block_size


@dataclass(frozen=True)
class BlockHashing:
    """How hashes of requests become hashes of a group's blocks."""

    hash_block_size: int
    coarse_mode: str = "concat"

    def of_block_size(self, block_hashes: Sequence[BlockHash], block_size: int) -> Sequence[BlockHash]:
        """The hashes themselves, or a live view with one entry per `block_size` tokens."""
        if block_size == self.hash_block_size:
            return block_hashes
        return BlockHashListWithBlockSize(block_hashes, self.hash_block_size, block_size, self.coarse_mode)


class KVCacheCoordinator(abc.ABC):
    """Managers of all groups and their pools. Owned by one `KVCacheManager`; subclasses answer lookups."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pools: tuple[BlockPool, ...],
        settings: ManagerSettings,
        hashing: BlockHashing,
        use_eagle: bool,
    ) -> None:
        self.pools = pools
        self.settings = settings
        self.hashing = hashing
        self.use_eagle = use_eagle
        self.fresh_blocks = tuple(FreshBlocks(pool.num_blocks) for pool in pools)
        self.pool_ids = tuple(group.pool_id for group in kv_cache_config.kv_cache_groups)
        self.managers = tuple(
            manager_class_of(group.kv_cache_spec)(
                group.kv_cache_spec, pools[group.pool_id], group_id, settings, self.fresh_blocks[group.pool_id]
            )
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )
        members: dict[tuple[object, int], list[int]] = {}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            members.setdefault((group.kv_cache_spec, group.pool_id), []).append(group_id)
        self.families = tuple(GroupFamily(tuple(ids), tuple(self.managers[i] for i in ids)) for ids in members.values())
        self.quiet_until = np.zeros(0, np.int64)  # [rows], -1: no request
        self._check_kinds()

    def _check_kinds(self) -> None:
        for family in self.families:
            manager = family.managers[0]
            kind = manager.kv_cache_spec.kind
            if self.use_eagle and not manager.supports_eagle:
                raise NotImplementedError(f"{kind} attention does not work with use_eagle=True")
            if self.settings.enable_caching and family.block_size % self.hashing.hash_block_size:
                raise ValueError(
                    f"expected hash_block_size to divide the block size of every group, got hash_block_size "
                    f"{self.hashing.hash_block_size} and {kind} blocks of {family.block_size} tokens"
                )

    @abc.abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The longest prefix of at most `max_length` tokens that every group can resume from."""

    # One request.

    def num_blocks_for_new(
        self, num_slots: int, hits: tuple[np.ndarray, ...], total_computed: int, capped: bool
    ) -> list[int]:
        """Per pool the free blocks that a first allocation takes."""
        needs = [0] * len(self.pools)
        for manager, pool_id, hit in zip(self.managers, self.pool_ids, hits, strict=True):
            needs[pool_id] += manager.num_blocks_for_new(num_slots, hit, total_computed, capped)
        return needs

    def num_blocks_for_running(self, row: int, num_slots: int, capped: bool = False) -> list[int]:
        """Per pool the free blocks that a row still needs."""
        needs = [0] * len(self.pools)
        for manager, pool_id in zip(self.managers, self.pool_ids, strict=True):
            needs[pool_id] += manager.num_blocks_for_running(row, num_slots, capped)
        return needs

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether every pool has the blocks free."""
        return all(need <= pool.num_free_blocks for need, pool in zip(needs, self.pools, strict=True))

    def reserve_rows(self, num_rows: int) -> None:
        """Makes every group's arrays hold `num_rows` rows."""
        missing = num_rows - self.quiet_until.size
        if missing > 0:
            self.quiet_until = np.pad(self.quiet_until, (0, missing), constant_values=-1)
            for manager in self.managers:
                manager.reserve_rows(num_rows)

    def remove_skipped_blocks(self, row: int, settled_tokens: int) -> None:
        """Gives back what left the windows of the row, group by group."""
        for manager in self.managers:
            manager.remove_skipped_blocks(row, settled_tokens)

    def add_computed_blocks(
        self, row: int, hits: tuple[np.ndarray, ...], total_computed: int, has_external: bool
    ) -> None:
        """Holds the hits of all groups, and only then takes blocks for tokens that come from outside.

        In this order no group's new blocks can evict another group's hit.
        """
        for manager, hit in zip(self.managers, hits, strict=True):
            manager.add_computed_blocks(row, hit, total_computed)
        if has_external:
            for manager in self.managers:
                manager.allocate_new_blocks(row, total_computed)

    def allocate_new_blocks(self, row: int, num_slots: int) -> tuple[np.ndarray, ...]:
        """Per group int32[k] new blocks, until the row has `num_slots` slots."""
        return tuple([manager.allocate_new_blocks(row, num_slots) for manager in self.managers])

    def cache_blocks(self, request: Request, row: int, num_tokens: int) -> None:
        """Registers the blocks that the first `num_tokens` tokens fill, group by group."""
        for manager in self.managers:
            if num_tokens >= (manager.num_cached_blocks.item(row) + 1) * manager.block_size:
                hashes = self.hashing.of_block_size(request.block_hashes, manager.block_size)
                manager.cache_blocks(request, row, hashes, num_tokens)

    def free(self, row: int) -> None:
        """Gives all blocks of the row back, group by group."""
        self.quiet_until[row] = -1
        for manager in self.managers:
            manager.free(row)

    def extend_row(
        self, request: Request, row: int, settled_tokens: int, num_slots: int, num_cacheable: int
    ) -> tuple[np.ndarray, ...] | None:
        """One step of a running row: gives back, appends up to `num_slots` slots, registers `num_cacheable` tokens.

        Returns:
            Per group int32[k] new blocks; None if they do not fit, when only skipped blocks were given back.
        """
        self.remove_skipped_blocks(row, settled_tokens)
        if not self.fits(self.num_blocks_for_running(row, num_slots)):
            return None
        new_ids = self.allocate_new_blocks(row, num_slots)
        self.cache_blocks(request, row, num_cacheable)
        self.note_quiet(row)
        return new_ids

    # Quiet rows: until a row reaches `quiet_until` slots, a step of it has nothing to do in any group.

    def note_quiet(self, row: int) -> None:
        """Renews one row's entry of `quiet_until`."""
        self.quiet_until[row] = min([family.managers[0].row_quiet_until(row) for family in self.families])

    def note_quiet_rows(self, rows: np.ndarray) -> None:
        """Renews the entries of int64[n] rows."""
        quiet = self.families[0].managers[0].quiet_until(rows)
        for family in self.families[1:]:
            quiet = np.minimum(quiet, family.managers[0].quiet_until(rows))
        self.quiet_until[rows] = quiet

    def new_step_starts(self) -> None:
        """Lets lookups hit what earlier steps registered."""
        for fresh in self.fresh_blocks:
            fresh.clear()

    # Checks.

    def check_invariants(self, owned_rows: Sequence[int]) -> None:
        """Raises InvariantError if a group's laws fail, counts of a family differ, or references are not the owners."""
        for manager in self.managers:
            manager.check_invariants(owned_rows)
        for family in self.families:
            first = family.managers[0]
            for manager in family.managers[1:]:
                for name in ("num_blocks", "first_live", "num_cached_blocks"):
                    if not np.array_equal(getattr(first, name), getattr(manager, name)):
                        raise InvariantError(f"groups {family.group_ids} of equal spec differ in {name}")
        rows = np.array(owned_rows, np.int64)
        quiet = self.quiet_until.copy()
        self.note_quiet_rows(rows)
        late = quiet[rows] > self.quiet_until[rows]
        self.quiet_until[:] = quiet
        if late.any():
            raise InvariantError(f"row {rows[late][0]} would sleep past its next allocation, registration or release")
        for pool_id, pool in enumerate(self.pools):
            owners = np.zeros(pool.num_blocks, np.int64)
            for manager, of_pool in zip(self.managers, self.pool_ids, strict=True):
                if of_pool == pool_id:
                    owners += np.bincount(manager.block_table.ravel(), minlength=pool.num_blocks)
            wrong = np.flatnonzero(owners[1:] != pool.ref_count[1:]) + 1
            if wrong.size:
                block_id = int(wrong[0])
                raise InvariantError(
                    f"pool {pool_id}, block {block_id}: {owners[block_id]} rows hold it, "
                    f"its ref_count is {pool.ref_count[block_id]}"
                )


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Prefix caching is off: every lookup misses. Any number of groups and pools."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """Nothing."""
        return (NO_BLOCK_IDS,) * len(self.managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its own hit is the answer."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The group's longest hit; any number of whole blocks will do."""
        manager = self.managers[0]
        hashes = self.hashing.of_block_size(block_hashes, manager.block_size)
        hit = manager.find_longest_cache_hit(PrefixLookup(hashes, max_length, (0,), manager.block_size, self.use_eagle))
        return hit, hit[0].size * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest length that all of them accept, a multiple of every block size.

    Each family maps a candidate length to the longest hit of its own that is no longer. Families whose hits are
    prefix-closed are asked once, first: their answer bounds everybody's and is cut at the end. The others are asked
    in turn until as many as there are have agreed on one length; with a single one, that is one question.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pools: tuple[BlockPool, ...],
        settings: ManagerSettings,
        hashing: BlockHashing,
        use_eagle: bool,
    ) -> None:
        super().__init__(kv_cache_config, pools, settings, hashing, use_eagle)
        self.alignment = lcm(*(family.block_size for family in self.families))

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The greatest common hit of all families."""
        length = max_length
        found: dict[int, tuple[np.ndarray, ...]] = {}  # family index -> ids per group
        closed = [i for i, family in enumerate(self.families) if family.managers[0].hits_are_prefix_closed]
        for index in closed:
            found[index], length = self._ask(index, block_hashes, length, max_length)
        others = [i for i in range(len(self.families)) if i not in found]
        agreed = turn = 0
        while agreed < len(others):
            index = others[turn % len(others)]
            found[index], shorter = self._ask(index, block_hashes, length, max_length)
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            turn += 1
        return self._by_group(found, length), length

    def _ask(
        self, index: int, block_hashes: Sequence[BlockHash], length: int, max_length: int
    ) -> tuple[tuple[np.ndarray, ...], int]:
        """The family's longest hit of at most `length` tokens; one that drops a block may look one block further."""
        family = self.families[index]
        size = family.block_size
        limit = min(length + size, max_length) if self.use_eagle else length
        hashes = self.hashing.of_block_size(block_hashes, size)
        lookup = PrefixLookup(hashes, limit, family.group_ids, self.alignment, self.use_eagle)
        ids = family.managers[0].find_longest_cache_hit(lookup)
        return ids, ids[0].size * size

    def _by_group(self, found: dict[int, tuple[np.ndarray, ...]], length: int) -> tuple[np.ndarray, ...]:
        """The families' ids in the order of groups, cut to `length` tokens."""
        hits = [NO_BLOCK_IDS] * len(self.managers)
        for index, ids_per_group in found.items():
            family = self.families[index]
            for group_id, ids in zip(family.group_ids, ids_per_group, strict=True):
                hits[group_id] = ids[: length // family.block_size]
        return tuple(hits)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    pools: tuple[BlockPool, ...],
    settings: ManagerSettings,
    hashing: BlockHashing,
    use_eagle: bool,
) -> KVCacheCoordinator:
    """The coordinator that a config needs: without prefix caching, of one group, or of several."""
    coordinator_class: type[KVCacheCoordinator]
    if not settings.enable_caching:
        coordinator_class = KVCacheCoordinatorNoPrefixCache
    elif len(kv_cache_config.kv_cache_groups) == 1:
        coordinator_class = UnitaryKVCacheCoordinator
    else:
        coordinator_class = HybridKVCacheCoordinator
    return coordinator_class(kv_cache_config, pools, settings, hashing, use_eagle)

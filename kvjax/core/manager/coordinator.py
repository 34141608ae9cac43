"""Groups side by side: one manager per spec, one pool per space of block ids, one answer per request.

Flow:    KVCacheManager -> [KVCacheCoordinator] -> SingleTypeKVCacheManager per spec -> BlockPool per pool
Source:  vLLM v1/core/kv_cache_coordinator.py; fixed point of hits: ARCHITECTURE.md, "Hybrid hits"

Groups of equal spec in one pool share a manager: they are looked up together and hold equally many blocks. Managers
stand in the order of their first groups; releases, new blocks and registrations of a request go manager by manager,
group by group.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from math import lcm
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvjax.core.hashing.block_hashing import BlockHashing
from kvjax.core.kinds.registry import manager_class_of
from kvjax.core.kinds.retention import Retention
from kvjax.core.kinds.single_type_manager import NEVER, ManagerSettings, PrefixLookup, SingleTypeKVCacheManager
from kvjax.core.kinds.state_steps import StateSteps
from kvjax.core.manager.copy_on_write import CopyOnWrite
from kvjax.core.manager.pins import Pins
from kvjax.core.manager.reservations import Reservations
from kvjax.core.manager.sub_block_hits import SubBlockHits
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.fresh_blocks import FreshBlocks
from kvjax.core.pool.kv_cache_blocks import NO_BLOCK_IDS
from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.core.watch.kv_events import GroupInfo
from kvjax.errors import InvariantError

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash
    from kvjax.core.requests.request import Request

Value = TypeVar("Value")
Hit = tuple[tuple[np.ndarray, ...], int]  # per group int32[k] ids, and the hit's tokens


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
        self._use_eagle = use_eagle
        self.fresh_blocks = tuple(FreshBlocks(pool.num_blocks) for pool in pools)
        self.managers, self.pool_ids = self._make_managers(kv_cache_config)
        self.num_groups = len(kv_cache_config.kv_cache_groups)
        self.no_ids = (NO_BLOCK_IDS,) * self.num_groups
        self._releasing_managers = tuple(manager for manager in self.managers if manager.gives_blocks_back)
        self._cacheable_managers = tuple(manager for manager in self.managers if manager.is_prefix_cacheable)
        self.reads_encoder = any(manager.reads_encoder for manager in self.managers)
        self.state_steps = StateSteps(tuple(m.state_blocks for m in self.managers if m.state_blocks is not None))
        self._place_of_group = {
            group_id: (manager, place) for manager in self.managers for place, group_id in enumerate(manager.group_ids)
        }
        self.quiet_until = np.zeros(0, np.int64)  # [rows], -1: no request
        self.copy_on_write = CopyOnWrite(self.managers, self.pool_ids, pools)
        self.drops_last_block = self._find_eagle_managers(kv_cache_config)  # per manager
        self._check_kinds()
        # Where no group needs a block at every length, a hit rests on its last one: something of it is cached.
        self.needs_last_block = not any(manager.hits_need_blocks() for manager in self._cacheable_managers)
        self.reservations = Reservations(self) if settings.reserve else None
        self.pins = Pins(self)
        self.sub_block_hits = SubBlockHits(self, kv_cache_config) if settings.sub_block_hits else None
        self.retention = self._make_retention()

    def _make_managers(
        self, kv_cache_config: KVCacheConfig
    ) -> tuple[tuple[SingleTypeKVCacheManager, ...], tuple[int, ...]]:
        """A manager per spec and pool, and the pool of each."""
        group_ids: dict[tuple[KVCacheSpec, int], list[int]] = {}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            group_ids.setdefault((group.kv_cache_spec, group.pool_id), []).append(group_id)
        managers = tuple(
            manager_class_of(spec)(spec, self.pools[pool_id], tuple(ids), self.settings, self.fresh_blocks[pool_id])
            for (spec, pool_id), ids in group_ids.items()
        )
        for manager in managers:
            self._describe_to_events(manager)
        return managers, tuple(pool_id for _, pool_id in group_ids)

    def _find_eagle_managers(self, kv_cache_config: KVCacheConfig) -> tuple[bool, ...]:
        """Whose hits drop their last block: those with a group of the drafting head; all, if no group is named."""
        groups = kv_cache_config.kv_cache_groups
        if not self._use_eagle or not any(group.is_eagle_group for group in groups):
            return (self._use_eagle,) * len(self.managers)
        return tuple(any(groups[i].is_eagle_group for i in manager.group_ids) for manager in self.managers)

    def _describe_to_events(self, manager: SingleTypeKVCacheManager) -> None:
        spec = manager.kv_cache_spec
        info = GroupInfo(manager.block_size, spec.kind, getattr(spec, "sliding_window", None))
        for group_id in manager.group_ids:
            manager.block_pool.register_group(group_id, info)

    def _check_kinds(self) -> None:
        for manager, drops in zip(self.managers, self.drops_last_block, strict=True):
            kind = manager.kv_cache_spec.kind
            if drops and not manager.supports_eagle:
                raise NotImplementedError(f"{kind} attention does not work with use_eagle=True")
            caches = self.settings.enable_caching and manager.is_prefix_cacheable
            if caches and manager.block_size % self.hashing.hash_block_size:
                raise ValueError(
                    f"expected hash_block_size to divide the block size of every group, got hash_block_size "
                    f"{self.hashing.hash_block_size} and {kind} blocks of {manager.block_size} tokens"
                )

    def _make_retention(self) -> Retention | None:
        """Checkpoints for all managers that can do with them; None: everything is registered."""
        interval = self.settings.retention_interval
        if interval is None:
            return None
        if not self.settings.enable_caching:
            raise ValueError(f"expected enable_caching=True with retention_interval, got {interval} without caching")
        if self.settings.sub_block_hits:
            raise NotImplementedError(f"retention_interval={interval} does not work with sub_block_hits=True")
        pairs = list(zip(self.managers, self.drops_last_block, strict=True))
        dropped = [manager.block_size * drops for manager, drops in pairs if manager.is_prefix_cacheable]
        retention = Retention(interval, self.alignment, max(dropped, default=0))
        for manager, drops in pairs:
            manager.retain(retention, drops)
        return retention

    # Groups and managers.

    @property
    def alignment(self) -> int:
        """Tokens of which every hit is a multiple."""
        return lcm(*(manager.block_size for manager in self._cacheable_managers))

    @property
    def gives_blocks_back(self) -> bool:
        """Whether any group gives blocks back before its request ends."""
        return bool(self._releasing_managers)

    @property
    def has_cacheable_groups(self) -> bool:
        """Whether any group's kind has a prefix cache."""
        return bool(self._cacheable_managers)

    def place_of_group(self, group_id: int) -> tuple[SingleTypeKVCacheManager, int]:
        """The manager of a group, and the group's place in its arrays."""
        return self._place_of_group[group_id]

    def by_group(self, by_manager: Sequence[Iterable[Value]]) -> tuple[Value, ...]:
        """What each manager says of each of its groups, in the order of groups."""
        if len(by_manager) == 1:
            return tuple(by_manager[0])
        values: list[Value | None] = [None] * self.num_groups
        for manager, of_groups in zip(self.managers, by_manager, strict=True):
            for group_id, value in zip(manager.group_ids, of_groups, strict=True):
                values[group_id] = value
        return tuple(values)  # type: ignore[arg-type]

    def by_manager(self, hits: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per manager int32[G, k], from per group int32[k]."""
        return [np.stack([hits[group_id] for group_id in manager.group_ids]) for manager in self.managers]

    @property
    def smallest_reusable_prefix(self) -> int:
        """Tokens of the shortest hit that there can be; 0 without prefix caching."""
        if not self.settings.enable_caching or not self._cacheable_managers:
            return 0
        if self.sub_block_hits is not None:
            return self.sub_block_hits.granularity
        return lcm(*(manager.block_size for manager in self._cacheable_managers))

    @abc.abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The longest prefix of at most `max_length` tokens that every group can resume from."""

    # One request.

    def row_block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Per group int32[k] copy of the row's blocks, nulls where they were given back."""
        return self.by_group([manager.row_block_ids(row) for manager in self.managers])

    def num_blocks_for_new(
        self,
        num_slots: int,
        hits: Sequence[np.ndarray],
        total_computed: int,
        capped: bool,
        num_encoder_tokens: int = 0,
        num_tokens: int = NEVER,
    ) -> list[int]:
        """Per pool the free blocks that a first allocation takes; `hits` are int32[k] per group.

        `num_tokens` are the slots without lookahead.
        """
        needs = [0] * len(self.pools)
        for manager, pool_id, ids in zip(self.managers, self.pool_ids, self.by_manager(hits), strict=True):
            slots = num_slots if manager.takes_lookahead else min(num_slots, num_tokens)
            slots = manager.slots_of(slots, num_encoder_tokens)
            needs[pool_id] += manager.num_blocks_for_new(slots, ids, total_computed, capped)
        return needs

    def num_blocks_for_running(
        self, row: int, num_slots: int, capped: bool = False, num_tokens: int = NEVER
    ) -> list[int]:
        """Per pool the free blocks that a row still needs; `num_tokens` are the slots without lookahead."""
        needs = [0] * len(self.pools)
        for manager, pool_id in zip(self.managers, self.pool_ids, strict=True):
            slots = num_slots if manager.takes_lookahead else min(num_slots, num_tokens)
            needs[pool_id] += manager.num_blocks_for_running(row, slots, capped)
        return needs

    def worst_case_blocks(self, num_slots: int) -> list[int]:
        """Per pool the most blocks that a request of at most `num_slots` slots ever holds at once."""
        needs = [0] * len(self.pools)
        for manager, pool_id in zip(self.managers, self.pool_ids, strict=True):
            needs[pool_id] += manager.worst_case_blocks(num_slots)
        return needs

    def check_encoder_tokens(self, num_encoder_tokens: int) -> None:
        """Raises ValueError for more encoder tokens than a group can hold."""
        limit = min(manager.max_encoder_tokens for manager in self.managers)
        if num_encoder_tokens > limit:
            raise ValueError(
                f"expected num_encoder_tokens <= {limit} (max_num_encoder_tokens), got {num_encoder_tokens}"
            )

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether every pool has the blocks free."""
        return all(need <= pool.num_free_blocks for need, pool in zip(needs, self.pools, strict=True))

    def reserve_rows(self, num_rows: int) -> None:
        """Makes every manager's arrays hold `num_rows` rows."""
        missing = num_rows - self.quiet_until.size
        if missing > 0:
            self.quiet_until = np.pad(self.quiet_until, (0, missing), constant_values=-1)
            self.copy_on_write.reserve_rows(num_rows)
            if self.retention is not None:
                self.retention.reserve_rows(num_rows)
            for manager in self.managers:
                manager.reserve_rows(num_rows)

    def remove_skipped_blocks(self, row: int, settled_tokens: int) -> None:
        """Gives back what left the windows of the row."""
        for manager in self._releasing_managers:
            manager.remove_skipped_blocks(row, settled_tokens)

    def add_computed_blocks(
        self, row: int, hits: Sequence[np.ndarray], total_computed: int, has_external: bool
    ) -> None:
        """Holds the hits of all groups, and only then takes blocks for tokens that come from outside.

        In this order no group's new blocks can evict another group's hit.
        """
        for manager, ids in zip(self.managers, self.by_manager(hits), strict=True):
            manager.add_computed_blocks(row, ids, total_computed)
        if has_external:
            for manager in self._cacheable_managers:
                manager.allocate_new_blocks(row, total_computed)

    def allocate_new_blocks(
        self, row: int, num_slots: int, num_encoder_tokens: int = 0, num_tokens: int = NEVER
    ) -> tuple[np.ndarray, ...]:
        """Per group int32[k] new blocks, until the row has `num_slots` slots; the encoder's are those of a new row.

        `num_tokens` are the slots without lookahead.
        """
        new_ids = []
        for manager in self.managers:
            slots = num_slots if manager.takes_lookahead else min(num_slots, num_tokens)
            new_ids.append(manager.allocate_new_blocks(row, manager.slots_of(slots, num_encoder_tokens)))
        return self.by_group(new_ids)

    def cache_blocks(self, request: Request, row: int, num_tokens: int) -> None:
        """Registers the blocks that the first `num_tokens` tokens fill."""
        for manager in self._cacheable_managers:
            if num_tokens >= (manager.num_cached_blocks.item(row) + 1) * manager.block_size:
                hashes: Sequence[BlockHash] = request.block_hashes
                if manager.block_size != self.hashing.hash_block_size:
                    hashes = self.hashing.of_block_size(hashes, manager.block_size)
                manager.cache_blocks(request, row, hashes, num_tokens)

    def free(self, row: int) -> None:
        """Gives all blocks of the row back."""
        self.quiet_until[row] = -1
        self.copy_on_write.unmark(row)
        if self.reservations is not None:
            self.reservations.release(row)
        for manager in self.managers:
            manager.free(row)

    def check_share(self, row: int, num_tokens: int, num_in_flight: int) -> None:
        """Checks that other rows could go on from the first `num_tokens` tokens of a row, with its blocks.

        Raises:
            ValueError: it has no blocks for them, or has given back some that those rows would need.
            NotImplementedError: a kind can not tell its tokens in flight from the others.
        """
        for manager in self.managers:
            manager.check_share(row, num_tokens, num_in_flight)

    def num_blocks_for_share(self, num_rows: int) -> list[int]:
        """Per pool the free blocks that so many new rows take when they are given what another holds."""
        needs = [0] * len(self.pools)
        for manager, pool_id in zip(self.managers, self.pool_ids, strict=True):
            needs[pool_id] += manager.num_blocks_for_share(num_rows)
        return needs

    def share_row(self, row: int, new_rows: np.ndarray, num_tokens: int) -> None:
        """Gives int64[n] new rows what a row holds of its first `num_tokens` tokens, and what it has reserved."""
        for manager in self.managers:
            manager.share_row(row, new_rows, num_tokens)
        if self.retention is not None:
            self.retention.share_row(row, new_rows)
        for each in [row, *new_rows.tolist()]:
            if self.copy_on_write.writes_to_its_blocks(each, num_tokens):
                self.copy_on_write.mark(each)
            self.note_quiet(each)
        if self.reservations is not None:
            for new_row in new_rows.tolist():
                self.reservations.add(new_row, self.reservations.slots_of(row), self.reservations.blocks_of(row))

    def extend_row(
        self,
        request: Request,
        row: int,
        settled_tokens: int,
        num_slots: int,
        num_cacheable: int,
        num_tokens: int = NEVER,
    ) -> tuple[np.ndarray, ...] | None:
        """One step of a running row: gives back, appends up to `num_slots` slots, registers `num_cacheable` tokens.

        `num_tokens` are the slots without lookahead.

        Returns:
            Per group int32[k] new blocks; None if they do not fit, when only skipped blocks were given back.
        """
        self.remove_skipped_blocks(row, settled_tokens)
        needs = self.num_blocks_for_running(row, num_slots, num_tokens=num_tokens)
        new_ids = self.no_ids
        if self.copy_on_write.is_sharing[row]:
            copies = self.copy_on_write.num_copies(row, request.num_computed_tokens)
            if not self.fits([need + more for need, more in zip(needs, copies, strict=True)]):
                return None
            self.copy_on_write.make_exclusive(row, request.num_computed_tokens)
        if any(needs):
            if not self.fits(needs):
                return None
            new_ids = self.allocate_new_blocks(row, num_slots, num_tokens=num_tokens)
        self.cache_blocks(request, row, num_cacheable)
        self.note_quiet(row)
        return new_ids

    # Quiet rows: until a row reaches `quiet_until` slots, a step of it has nothing to do in any group, nor to refuse.

    def note_quiet(self, row: int) -> None:
        """Renews one row's entry of `quiet_until`."""
        quiet_until = 0 if self.copy_on_write.is_sharing[row] else self.settings.max_model_len
        for manager in self.managers:
            quiet_until = min(quiet_until, manager.row_quiet_until(row))
        self.quiet_until[row] = quiet_until

    def new_step_starts(self) -> None:
        """Lets lookups hit what earlier steps registered."""
        for fresh in self.fresh_blocks:
            fresh.clear()
        if self.sub_block_hits is not None:
            self.sub_block_hits.new_step_starts()

    # Checks.

    def check_invariants(self, owned_rows: Sequence[int]) -> None:
        """Raises InvariantError if a manager's laws, M1 or M3 (see `KVCacheManager`) do not hold."""
        for manager in self.managers:
            manager.check_invariants(owned_rows)
        if self.reservations is not None:
            self.reservations.check_invariants(owned_rows)
        self.pins.check_invariants()
        for row in owned_rows:
            if self.quiet_until[row] > min(manager.row_quiet_until(row) for manager in self.managers):
                raise InvariantError(f"M3: row {row} sleeps past its next allocation, registration or release")
        for pool_id, pool in enumerate(self.pools):
            owners = pool.num_outside_refs.astype(np.int64)
            for manager, of_pool in zip(self.managers, self.pool_ids, strict=True):
                if of_pool == pool_id:
                    owners[manager.reserved_block_ids] += 1
                    owners += np.bincount(manager.block_tables.ravel(), minlength=pool.num_blocks)
            wrong = np.flatnonzero(owners[1:] != pool.ref_count[1:]) + 1
            if wrong.size:
                block_id = int(wrong[0])
                raise InvariantError(
                    f"M1: pool {pool_id}, block {block_id}: {owners[block_id]} owners, "
                    f"ref_count {pool.ref_count[block_id]}"
                )


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Prefix caching is off, or no kind has it: every lookup misses. Any number of groups and pools."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """Nothing."""
        return self.no_ids, 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its own hit is the answer."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The group's longest hit; any number of whole blocks will do."""
        manager = self.managers[0]
        hashes = self.hashing.of_block_size(block_hashes, manager.block_size)
        drops = self.drops_last_block[0]
        lookup = PrefixLookup(hashes, max_length, manager.block_size, drops, self.needs_last_block)
        hit = manager.find_longest_cache_hit(lookup)
        return tuple(hit), hit.shape[1] * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest length that all of them accept, a multiple of every block size.

    Each manager maps a candidate length to the longest hit of its own that is no longer. Managers whose hits are
    prefix-closed are asked once, first: their answer bounds everybody's and is cut at the end. The others are asked
    in turn until as many as there are have agreed on one length; with a single one, that is one question.
    """

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> Hit:
        """The greatest common hit of all groups."""
        alignment = self.alignment
        length = max_length
        found = {  # manager -> int32[G, k]
            index: np.empty((manager.num_groups, 0), np.int32)
            for index, manager in enumerate(self.managers)
            if not manager.is_prefix_cacheable
        }

        def ask(index: int) -> int:
            """The manager's longest hit of at most `length` tokens; one that drops a block may look a block further."""
            manager, drops = self.managers[index], self.drops_last_block[index]
            limit = min(length + manager.block_size, max_length) if drops else length
            hashes = self.hashing.of_block_size(block_hashes, manager.block_size)
            lookup = PrefixLookup(hashes, limit, alignment, drops, self.needs_last_block)
            found[index] = manager.find_longest_cache_hit(lookup)
            return found[index].shape[1] * manager.block_size

        others = []
        for index, manager in enumerate(self.managers):
            if index in found:
                continue
            if manager.hits_are_prefix_closed:
                length = ask(index)
            else:
                others.append(index)
        agreed = turn = 0
        while agreed < len(others):
            shorter = ask(others[turn % len(others)])
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            turn += 1
        cut = [found[index][:, : length // manager.block_size] for index, manager in enumerate(self.managers)]
        return self.by_group(cut), length


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    pools: tuple[BlockPool, ...],
    settings: ManagerSettings,
    hashing: BlockHashing,
    use_eagle: bool,
) -> KVCacheCoordinator:
    """The coordinator that a config needs: without prefix caching, of one group, or of several."""
    coordinator_class: type[KVCacheCoordinator]
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not settings.enable_caching or not any(manager_class_of(spec).is_prefix_cacheable for spec in specs):
        coordinator_class = KVCacheCoordinatorNoPrefixCache
    elif len(specs) == 1:
        coordinator_class = UnitaryKVCacheCoordinator
    else:
        coordinator_class = HybridKVCacheCoordinator
    return coordinator_class(kv_cache_config, pools, settings, hashing, use_eagle)

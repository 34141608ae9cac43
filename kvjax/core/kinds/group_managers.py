"""The groups of a deployment: one manager per spec and pool, and what all work over groups has to know of them.

Flow:    KVCacheConfig, pools, settings -> [GroupManagers] -> lookups, slots, steps, forks, pins, miss reasons
Source:  vLLM v1/core/kv_cache_coordinator.py (its managers)

Groups of equal spec in one pool share a manager: they are looked up together and hold equally many blocks. Managers
stand in the order of their first groups; releases, new blocks and registrations of a request go manager by manager,
group by group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvjax.core.hashing.block_hashing import BlockHashing
from kvjax.core.kinds.checkpoint_columns import CheckpointColumns, CheckpointNeed
from kvjax.core.kinds.encoder_columns import EncoderManager
from kvjax.core.kinds.inner_states import CheckpointRule, InnerStates
from kvjax.core.kinds.manager_settings import ManagerSettings
from kvjax.core.kinds.positional import PositionalManager
from kvjax.core.kinds.recurrent import RecurrentManager
from kvjax.core.kinds.retention import Retention, default_interval
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.kinds.state_steps import StateSteps
from kvjax.core.options.manager_options import AUTO
from kvjax.core.pool.block_ids import without_null
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.fresh_blocks import FreshBlocks
from kvjax.core.pool.kv_cache_blocks import NO_BLOCK_IDS, KVCacheBlocks
from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.core.watch.kv_events import GroupInfo

if TYPE_CHECKING:
    from kvjax.core.requests.request import Request

Value = TypeVar("Value")


class GroupManagers:
    """What there is: managers, their pools, and the settings that they share. Nothing is exchanged once it is made.

    Made by one `KVCacheManager`, which hands it to its parts.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pools: tuple[BlockPool, ...],
        settings: ManagerSettings,
    ) -> None:
        """Managers of all groups, without rows.

        Raises:
            ValueError: a spec has no manager, `hash_block_size` does not divide a block size, or `retention_interval`
                is no multiple of every block size.
            NotImplementedError: a kind does not work with EAGLE or context parallelism, or `retention_interval` with
                `sub_block_hits`.
        """
        self.pools = pools
        self.settings = settings
        options = self.options = settings.options
        self.hashing = BlockHashing(settings.hash_block_size, options.rules.coarse_hash_mode)
        self.fresh_blocks = tuple(FreshBlocks(pool.num_blocks) for pool in pools)
        self.managers, self.pool_ids = self._make_managers(kv_cache_config)
        self.num_groups = len(kv_cache_config.kv_cache_groups)
        self.drops_last_block = self._find_eagle_managers(kv_cache_config, options.use_eagle)  # per manager
        self.cacheable = tuple(manager for manager in self.managers if manager.is_prefix_cacheable)
        self.releasing = tuple(manager for manager in self.managers if manager.releases)  # before their requests end
        self.has_tier = pools[0].tier_link is not None  # whether blocks can lie beyond the pools
        windows = [manager.kv_cache_spec.rswa_window for manager in self.managers]
        # Tokens behind a prompt that see all before them; None: all do, or are cached alike.
        self.rswa_window = min((window for window in windows if window is not None), default=None)
        if options.rules.rswa_as_vllm:
            self.rswa_window = None
        self.reads_encoder = any(manager.reads_encoder for manager in self.managers)
        self.whole_blocks = lcm(*(manager.block_size for manager in self.cacheable))  # tokens
        self.has_inner_hits = self._find_inner_hits()  # whether hits may end inside blocks, by the hash blocks' hashes
        # Tokens of which hits are multiples.
        self.alignment = self.hashing.hash_block_size if self.has_inner_hits else self.whole_blocks
        # Where no group needs a block at every length, a hit rests on its last one: something of it is cached.
        self.needs_last_block = not any(manager.hits_need_blocks() for manager in self.cacheable)
        self.sub_block_indices = tuple(m.sub_blocks for m in self.managers if m.sub_blocks is not None)
        dropped = [manager.block_size * drops for manager, drops in self.cacheable_lookups]
        self.num_dropped_tokens = max(dropped, default=0)  # at the end of a hit, by EAGLE
        kinds = tuple(m.state_blocks for m in self.managers if m.state_blocks is not None)
        self.state_steps = StateSteps(kinds, self.num_dropped_tokens)
        self.pool_of_group = tuple(pools[group.pool_id] for group in kv_cache_config.kv_cache_groups)
        self.no_ids = (NO_BLOCK_IDS,) * self.num_groups
        self.no_blocks = KVCacheBlocks(self.no_ids, self.pool_of_group)
        self._no_ids_by_manager = [manager.no_blocks for manager in self.managers]
        self._place_of_group = {
            group_id: (manager, place) for manager in self.managers for place, group_id in enumerate(manager.group_ids)
        }
        # Whether the block that EAGLE drops may hold the last token, as in vLLM 0.33's hybrids: it is computed again.
        self.may_drop_end = self.num_groups > 1
        self._check_kinds()
        self.retention = self._make_retention()
        self._register_what_hits_need()
        self._keep_inner_states()
        self.states_on_the_way = self._find_states_on_the_way()
        recurrent = (manager for manager in self.managers if isinstance(manager, RecurrentManager))
        self.rings = tuple(manager for manager in recurrent if manager.has_drafts_in_rings)
        self.checkpoints_in_step = self.options.checkpoints_in_step if self.states_on_the_way else 0
        if any(manager.forgets for manager in self.managers):
            for pool in pools:
                pool.eviction_policy.note_checkpoints()
        checkpoints = [(manager, manager.checkpoints) for manager in self.cacheable]
        # What has blocks on probation, and what a hit needs of it.
        self.on_probation = tuple((m, columns.need) for m, columns in checkpoints if columns and columns.has_probation)

    def _make_managers(
        self, kv_cache_config: KVCacheConfig
    ) -> tuple[tuple[SingleTypeKVCacheManager, ...], tuple[int, ...]]:
        """A manager per spec and pool, and the pool of each."""
        group_ids: dict[tuple[KVCacheSpec, int], list[int]] = {}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            group_ids.setdefault((group.kv_cache_spec, group.pool_id), []).append(group_id)
        managers = tuple(
            _family_of(spec)(spec, self.pools[pool_id], tuple(ids), self.settings, self.fresh_blocks[pool_id])
            for (spec, pool_id), ids in group_ids.items()
        )
        for manager in managers:
            _describe_to_events(manager)
        return managers, tuple(pool_id for _, pool_id in group_ids)

    def _find_eagle_managers(self, kv_cache_config: KVCacheConfig, use_eagle: bool) -> tuple[bool, ...]:
        """Whose hits drop their last block: those with a group of the drafting head; all, if no group is named."""
        groups = kv_cache_config.kv_cache_groups
        if not use_eagle or not any(group.is_eagle_group for group in groups):
            return (use_eagle,) * len(self.managers)
        return tuple(any(groups[i].is_eagle_group for i in manager.group_ids) for manager in self.managers)

    def _check_kinds(self) -> None:
        for manager, drops in zip(self.managers, self.drops_last_block, strict=True):
            kind = manager.kv_cache_spec.kind
            if drops and not manager.kv_cache_spec.supports_eagle:
                raise NotImplementedError(f"{kind} attention does not work with use_eagle=True")
            caches = self.options.enable_caching and manager.is_prefix_cacheable
            if caches and manager.block_size % self.hashing.hash_block_size:
                raise ValueError(
                    f"expected hash_block_size to divide the block size of every group, got hash_block_size "
                    f"{self.hashing.hash_block_size} and {kind} blocks of {manager.block_size} tokens"
                )

    @property
    def _registers_inside(self) -> bool:
        """Whether vLLM 0.33's rules register a prompt's last hash in the block that it lies in."""
        rules = self.options.rules
        is_vllms = rules.inner_hits and rules.retention_ends != "all"
        return is_vllms and self.options.enable_caching and self.num_groups > 1

    def _find_inner_hits(self) -> bool:
        unit, options = self.hashing.hash_block_size, self.options
        if not self._registers_inside or options.sub_block_hits or self.pools[0].tier_link is not None:
            return False
        sizes = [manager.block_size for manager in self.cacheable if manager.holds_states]
        fit = all(m.holds_states or not m.forgets or m.block_size == unit for m in self.cacheable)
        least = unit if options.rules.inner_hits_of_units else unit + 1
        return fit and max(sizes, default=0) >= least and self.whole_blocks > unit

    def _keep_inner_states(self) -> None:
        """Lets managers of states keep some inside blocks, by vLLM's rules or where devices leave checkpoints."""
        for manager in self.managers:
            if not isinstance(manager, RecurrentManager) or not manager.enable_caching:
                continue
            spec = manager.kv_cache_spec
            if not self._registers_inside and not spec.num_prefill_checkpoint_blocks:
                continue
            if self.rswa_window is not None:
                raise NotImplementedError(
                    "expected num_prefill_checkpoint_blocks=0 of states beside R-SWA, whose answers are not registered"
                )
            if manager.answer_states is not None:
                raise NotImplementedError(
                    "expected retention_interval by vLLM's rules (`ManagerOptions.vllm`) with "
                    f"num_prefill_checkpoint_blocks={spec.num_prefill_checkpoint_blocks}"
                )
            rule = CheckpointRule(
                block_size=manager.block_size,
                unit=self.alignment,
                hash_block_size=self.hashing.hash_block_size,
                drops_unit=self.options.use_eagle,
                num_lookahead=self.options.num_hash_lookahead_tokens,
                multiple=spec.prefill_checkpoint_alignment if spec.num_prefill_checkpoint_blocks else None,
            )
            manager.inner_states = InnerStates(rule, spec.num_speculative_blocks, self._registers_inside)

    def keep_shared_tails(self) -> None:
        """From now on states at the ends of prefixes that requests share are registered too, inside blocks."""
        for manager in self.managers:
            if manager.inner_states is not None:
                manager.inner_states.keeps_shared = True

    def _make_retention(self) -> Retention | None:
        """Checkpoints for all managers that can do with them; None: everything is registered."""
        interval = self.options.retention_interval
        if interval == AUTO:
            interval = self._default_interval()
        if interval is None:
            return None
        assert isinstance(interval, int)  # as ManagerOptions checked
        if not self.options.enable_caching:
            raise ValueError(f"expected enable_caching=True with retention_interval, got {interval} without caching")
        if self.options.sub_block_hits:
            raise NotImplementedError(f"retention_interval={interval} does not work with sub_block_hits=True")
        ends = self.options.rules.retention_ends
        return Retention(interval, self.alignment, self.num_dropped_tokens, ends, self.whole_blocks)

    def _default_interval(self) -> int | None:
        """Where a kind forgets and hits are of whole blocks; None elsewhere."""
        forgets = any(manager.forgets for manager in self.cacheable)
        if forgets and self.options.enable_caching and not self.options.sub_block_hits:
            return default_interval(self.alignment)
        return None

    def _register_what_hits_need(self) -> None:
        """Lets managers of kinds that forget register only what a hit at a checkpoint, or of whole blocks, can use."""
        retention = self.retention
        if not self.options.enable_caching or self.options.sub_block_hits or (self.has_inner_hits and not retention):
            return
        keeps_varying = retention is None or retention.is_vllms
        for manager, drops in self.cacheable_lookups:
            if manager.forgets and not (manager.kv_cache_spec.hit_size_varies and keeps_varying):
                manager.retain(self._checkpoints_of(manager, drops))

    def _checkpoints_of(self, manager: SingleTypeKVCacheManager, drops_last_block: bool) -> CheckpointColumns:
        """What hits of a manager's kind need: on probation where its pool's policy knows that, else left out."""
        need = CheckpointNeed(
            manager.block_size,
            manager.kv_cache_spec.skipped_tokens,
            self.settings.max_model_len + self.alignment,
            num_before=int(self.needs_last_block),
            num_after=int(drops_last_block and not manager.holds_states),
            num_first=manager.num_kept_columns,
        )
        retention = self.retention
        if retention is None:
            return CheckpointColumns(need, self.alignment, manager.max_columns, None)
        has_probation = not retention.is_vllms and manager.block_pool.eviction_policy.knows_probation
        interval = self.alignment if has_probation else retention.interval
        return CheckpointColumns(need, interval, manager.max_columns, retention, has_probation)

    def _find_states_on_the_way(self) -> tuple[RecurrentManager, ...]:
        """The managers of recurrent states; none unless all can leave one inside a step."""
        found = tuple(manager for manager in self.cacheable if isinstance(manager, RecurrentManager))
        return found if all(manager.leaves_states_on_the_way for manager in found) else ()

    def lookup_limit(self, manager: SingleTypeKVCacheManager, length: int, max_length: int, num_hashed: int) -> int:
        """Tokens that a manager whose hits drop a block looks at, for a hit of at most `length` tokens.

        `max_length` is that of a hit, `num_hashed` the tokens that have hashes.
        """
        return min(length + manager.block_size, num_hashed if self.may_drop_end else max_length)

    def longest_hit(self, request: Request) -> int:
        """Tokens of the longest hit that the request can use."""
        longest = request.num_tokens - 1
        return longest if self.rswa_window is None else min(longest, request.num_prompt_tokens + self.rswa_window)

    @property
    def cacheable_lookups(self) -> list[tuple[SingleTypeKVCacheManager, bool]]:
        """The managers whose kind has a prefix cache, each with whether its hits drop their last block."""
        pairs = zip(self.managers, self.drops_last_block, strict=True)
        return [(manager, drops) for manager, drops in pairs if manager.is_prefix_cacheable]

    def place_of_group(self, group_id: int) -> tuple[SingleTypeKVCacheManager, int]:
        """The manager of a group, and the group's place in its arrays."""
        return self._place_of_group[group_id]

    def by_pool(self, block_ids: Sequence[npt.ArrayLike]) -> list[np.ndarray]:  # int64[k] each
        """Per pool the blocks of all groups (integer[k] each), without null ones."""
        found: list[list[np.ndarray]] = [[NO_BLOCK_IDS] for _ in self.pools]
        for pool, ids in zip(self.pool_of_group, block_ids, strict=True):
            found[self.pools.index(pool)].append(without_null(np.asarray(ids, np.int64)))
        return [np.concatenate(parts, dtype=np.int64) for parts in found]

    def by_group(self, by_manager: Sequence[Iterable[Value]]) -> tuple[Value, ...]:
        """What each manager says of each of its groups, in the order of groups."""
        if self.num_groups == 1:
            return (next(iter(by_manager[0])),)  # an array is slow to tell that it ends
        if len(by_manager) == 1:
            return tuple(by_manager[0])
        values: list[Value | None] = [None] * self.num_groups
        for manager, of_groups in zip(self.managers, by_manager, strict=True):
            for group_id, value in zip(manager.group_ids, of_groups, strict=True):
                values[group_id] = value
        return tuple(values)  # type: ignore[arg-type]

    def by_manager(self, hits: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per manager int32[G, k], from per group int32[k]."""
        if hits is self.no_ids:
            return self._no_ids_by_manager
        if self.num_groups == 1:
            return [hits[0][None]]
        return [np.stack([hits[group_id] for group_id in manager.group_ids]) for manager in self.managers]

    def blocks(self, ids: tuple[np.ndarray, ...]) -> KVCacheBlocks:
        """Per group int32[k] as a value; the shared empty one if there are none."""
        if ids is self.no_ids:
            return self.no_blocks
        for group_ids in ids:
            if group_ids.size:
                return KVCacheBlocks(ids, self.pool_of_group)
        return self.no_blocks

    def row_block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Per group int32[k] copy of the row's blocks, nulls where they were released."""
        return self.by_group([manager.row_block_ids(row) for manager in self.managers])

    @property
    def num_losses(self) -> int:
        """Grows whenever a block of any pool loses its hash."""
        return sum([pool.prefix_index.num_losses for pool in self.pools])

    def are_fresh(self, block_ids: Sequence[np.ndarray]) -> bool:
        """Whether a step registers any of per group int32[k] blocks, or a state of the same tokens as the last."""
        pairs = ((self.place_of_group(i)[0], i, ids) for i, ids in enumerate(block_ids))
        return any(
            manager.fresh_blocks.cut(ids) < ids.size
            or (ids.size > 0 and manager.computes_again(group_id, ids.item(-1)))
            for manager, group_id, ids in pairs
        )

    def new_step_starts(self) -> None:
        """Lets lookups hit what earlier steps registered."""
        for fresh in self.fresh_blocks:
            fresh.clear()
        for index in self.sub_block_indices:
            index.new_step_starts()
        for manager in self.managers:
            if manager.answer_states is not None:
                manager.answer_states.new_step_starts()


def _family_of(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    if spec.state_pages is not None:
        return RecurrentManager
    return EncoderManager if spec.reads_encoder else PositionalManager


def _describe_to_events(manager: SingleTypeKVCacheManager) -> None:
    spec = manager.kv_cache_spec
    info = GroupInfo(manager.block_size, spec.kind, getattr(spec, "sliding_window", None))
    for group_id in manager.group_ids:
        manager.block_pool.register_group(group_id, info)


__all__ = ["GroupManagers"]

"""What can be read of a running manager's tables and pools; nothing here changes them.

Flow:    schedulers, build_step_plan, tests -> [ManagerReader] -> block tables, block ids, usage, snapshots
Source:  names of vLLM v1/core/kv_cache_manager.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.manager_snapshot import KVCacheManagerSnapshot, describe_manager, take_snapshot
from kvjax.core.manager.pins import Pins
from kvjax.core.manager.reservations import Reservations
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.pool.block import KVCacheBlock
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.slabs.slab_memory import SlabMemory
from kvjax.core.step.group_plans import GroupTables
from kvjax.core.tables.given_arrays import read_only


class ManagerReader:
    """The reading half of `KVCacheManager`: an interface over its public attributes, without state of its own."""

    block_pools: tuple[BlockPool, ...]
    slabs: SlabMemory | None
    groups: GroupManagers
    request_table: RequestTable
    row_blocks: RowBlocks
    pins: Pins
    reservations: Reservations | None

    @property
    def block_pool(self) -> BlockPool:
        """The first pool; the only one of most configs."""
        return self.block_pools[0]

    @property
    def usage(self) -> float:
        """Held share of the fullest pool, 0 to 1."""
        return max(pool.get_usage() for pool in self.block_pools)

    @property
    def state_block_size(self) -> int:
        """Tokens of whole blocks of every recurrent group: a step with so many takes any prompt on (`limit_step`).

        1 where steps may end anywhere.
        """
        return self.groups.state_steps.block_size

    @property
    def knows_tokens_in_flight(self) -> bool:
        """Whether `fork` can leave tokens out; not where a state holds all of them."""
        return not any(manager.holds_states for manager in self.groups.managers)

    def group_tables(self) -> list[GroupTables]:
        """The live block tables of all groups, those of one spec in one pool side by side: what plans are read from."""
        return [
            GroupTables(
                m.group_ids,
                m.block_size,
                read_only(m.block_tables),
                read_only(m.num_blocks),
                self.groups.checkpoints_in_step if m in self.groups.states_on_the_way else 0,
            )
            for m in self.groups.managers
        ]

    def block_tables(self, group_id: int) -> np.ndarray:  # int32[rows, columns]
        """The group's live block table, read-only; ask again once it may have grown."""
        manager, place = self.groups.place_of_group(group_id)
        return read_only(manager.block_tables[place])

    def reserved_blocks(self, group_id: int) -> np.ndarray:  # int32[k]
        """Blocks that the group holds for good: those of learned sinks, which the model writes once."""
        manager, place = self.groups.place_of_group(group_id)
        return manager.reserved_block_ids[place]

    def block_size(self, group_id: int) -> int:
        """Tokens of one of the group's blocks, those on all ranks of context parallelism."""
        return self.groups.place_of_group(group_id)[0].block_size

    def num_blocks(self, group_id: int) -> np.ndarray:  # int64[rows]
        """Blocks in each row of the group's table, nulls included; live and read-only."""
        return read_only(self.groups.place_of_group(group_id)[0].num_blocks)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a running request.

        Raises:
            UnknownRequestError: the manager holds no such request.
        """
        row = self.request_table.row_of(request_id)
        return KVCacheBlocks(self.groups.row_block_ids(row), self.groups.pool_of_group)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Per group the ids of a running request's blocks.

        Raises:
            UnknownRequestError: the manager holds no such request.
        """
        return tuple(ids.tolist() for ids in self.groups.row_block_ids(self.request_table.row_of(request_id)))

    def create_kv_cache_blocks(self, blocks: Sequence[Iterable[int | KVCacheBlock]]) -> KVCacheBlocks:
        """Per group ids or blocks as a value; the shared empty one if there are none.

        Raises:
            ValueError: not one sequence per group.
        """
        if len(blocks) != self.groups.num_groups:
            raise ValueError(f"expected blocks of {self.groups.num_groups} groups, got {len(blocks)}")
        ids = tuple(
            np.array([block.block_id if isinstance(block, KVCacheBlock) else block for block in group], np.int32)
            for group in blocks
        )
        return self.groups.blocks(ids)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Per group the leading blocks of a running request that all running requests share.

        Raises:
            UnknownRequestError: the manager holds no such request.
        """
        row = self.request_table.row_of(request_id)
        running = len(self.request_table)
        by_manager = [manager.get_num_common_prefix_blocks(row, running) for manager in self.groups.managers]
        return list(self.groups.by_group(by_manager))

    def snapshot(self) -> KVCacheManagerSnapshot:
        """The whole state as values. O(blocks + tokens)."""
        return take_snapshot(self.groups, self.row_blocks, self.request_table, self.pins, self.slabs)

    def check_invariants(self) -> None:
        """Checks M1 to M3 and the laws of pools, groups and request table. O(blocks + table).

        Raises:
            InvariantError: one of them is broken.
        """
        self.request_table.check_invariants()
        for pool in self.block_pools:
            pool.check_invariants()
        if self.slabs is not None:
            self.slabs.check_invariants()
        owned_rows = [row for row, request in enumerate(self.request_table.requests) if request is not None]
        self.row_blocks.check_invariants(owned_rows)
        if self.reservations is not None:
            self.reservations.check_invariants(owned_rows)
        self.pins.check_invariants()

    def describe(self) -> str:
        """A few lines for a person: groups, pools, requests."""
        return describe_manager(self.groups, self.request_table)


__all__ = ["ManagerReader"]

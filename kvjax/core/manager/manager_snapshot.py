"""The state of a manager as comparable values, and in words.

Flow:    parts of a KVCacheManager -> [take_snapshot, describe_manager] -> tests, people
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.pins import Pins
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.pool.block_pool_snapshot import BlockPoolSnapshot
from kvjax.core.requests.request_table import RequestState, RequestTable
from kvjax.core.slabs.slab_memory import SlabMemory


@dataclass(frozen=True)
class KVCacheManagerSnapshot:
    """The state of a manager, comparable: equal snapshots answer every further sequence of calls equally.

    Rows are left out: which row a request has does not matter to what happens.
    """

    pools: tuple[BlockPoolSnapshot, ...]
    requests: dict[str, RequestState]
    block_ids: dict[str, tuple[tuple[int, ...], ...]]  # request -> per group
    num_cached_blocks: dict[str, tuple[int, ...]]  # request -> per group
    fresh_blocks: tuple[tuple[int, ...], ...]  # per pool, registered in this step and not yet to be hit
    sharing_requests: tuple[str, ...]  # in ascending order, those that share a partly filled block since a fork
    pins: dict[int, tuple[tuple[int, ...], ...]]  # pin -> per group
    checkpoints: dict[str, tuple[int, ...]]  # request -> tokens, where `retention_interval` is given
    slab_owners: tuple[int, ...]  # see `SlabMemory.snapshot`; () where no pools share slabs


def take_snapshot(
    groups: GroupManagers,
    row_blocks: RowBlocks,
    request_table: RequestTable,
    pins: Pins,
    slabs: SlabMemory | None,
) -> KVCacheManagerSnapshot:
    """The whole state as values. O(blocks + tokens)."""
    rows = {request.request_id: row for row, request in enumerate(request_table.requests) if request}
    num_cached = groups.by_group([[m.num_cached_blocks] * m.num_groups for m in groups.managers])
    return KVCacheManagerSnapshot(
        pools=tuple(pool.snapshot() for pool in groups.pools),
        requests=request_table.snapshot(),
        block_ids={name: tuple(tuple(ids.tolist()) for ids in groups.row_block_ids(row)) for name, row in rows.items()},
        num_cached_blocks={name: tuple(counts.item(row) for counts in num_cached) for name, row in rows.items()},
        fresh_blocks=tuple(tuple(fresh.block_ids()) for fresh in groups.fresh_blocks),
        sharing_requests=tuple(sorted(name for name, row in rows.items() if row_blocks.copy_on_write.is_sharing[row])),
        pins=pins.snapshot(),
        checkpoints={}
        if groups.retention is None
        else {name: groups.retention.lengths_of(row) for name, row in rows.items()},
        slab_owners=() if slabs is None else slabs.snapshot(),
    )


def describe_manager(groups: GroupManagers, request_table: RequestTable) -> str:
    """Groups, pools and the number of requests, a few lines."""
    lines = [f"KV cache of {groups.num_groups} groups, {len(request_table)} running requests"]
    for manager, pool_id in zip(groups.managers, groups.pool_ids, strict=True):
        kept = manager.kept_columns_of(np.arange(manager.num_blocks.size))
        held = np.minimum(manager.num_blocks, manager.num_blocks - manager.first_live + kept)
        num_held = manager.num_groups * int(held.sum())
        lines.append(
            f"groups {manager.group_ids}: {manager.kv_cache_spec.kind}, blocks of {manager.block_size} tokens "
            f"in pool {pool_id}, {num_held} in tables"
        )
    return "\n".join(lines + [pool.describe() for pool in groups.pools])

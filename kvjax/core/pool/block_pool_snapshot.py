"""The state of a block pool as comparable values, and in words.

Flow:    BlockPool -> [take_pool_snapshot, describe_pool] -> tests, people
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.core.pool.page_edits import PageEditsSnapshot

if TYPE_CHECKING:
    from kvjax.core.hashing.block_origin import BlockOrigin
    from kvjax.core.pool.block_pool import BlockPool


@dataclass(frozen=True)
class BlockPoolSnapshot:
    """The state of a pool, comparable: equal snapshots answer every further sequence of calls equally."""

    free_order: tuple[int, ...]
    ref_count: tuple[int, ...]  # by block id
    blocks_by_hash: dict[int, dict[bytes, tuple[int, ...]]]  # group -> hash -> blocks as registered
    page_edits: PageEditsSnapshot
    policy_state: Any = ()  # of the eviction policy, beside the order
    origins: dict[int, BlockOrigin] | None = None  # by hashed block


def take_pool_snapshot(pool: BlockPool) -> BlockPoolSnapshot:
    """The whole state as values. O(num_blocks)."""
    return BlockPoolSnapshot(
        free_order=tuple(pool.eviction_policy.order().tolist()),
        ref_count=tuple(pool.ref_count.tolist()),
        blocks_by_hash=pool.prefix_index.snapshot(),
        page_edits=pool.page_edits.snapshot(),
        policy_state=pool.eviction_policy.state(),
        origins=None if pool.origins is None else pool.origins.snapshot(),
    )


def describe_pool(pool: BlockPool) -> str:
    """A few lines."""
    held = pool.num_usable_blocks - pool.num_free_blocks
    cached_free = int(np.count_nonzero(pool.is_hashed & (pool.ref_count == 0)))
    shared = int(np.count_nonzero(pool.ref_count > 1))
    following = pool.eviction_policy.order()[:8].tolist()
    return "\n".join(
        [
            f"pool of {pool.num_blocks} blocks (null block included), groups {tuple(pool.hash_maps)}, "
            f"{type(pool.eviction_policy).__name__}, free order {pool.free_order}, "
            f"prefix caching {'on' if pool.enable_caching else 'off'}",
            f"  held    {held} ({pool.get_usage():.1%}), {shared} of them shared",
            f"  free    {pool.num_free_blocks}, {cached_free} of them cached; next {following}",
            f"  hashed  {pool.num_hashed_blocks}, {sum(map(len, pool.hash_maps.values()))} distinct hashes",
        ]
    )

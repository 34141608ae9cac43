"""What a manager does with its cached blocks as a whole: forgets some of them, or all.

Flow:    KVCacheManager.evict_blocks, invalidate, stop_registering, reset_prefix_cache -> [PrefixCacheControl] -> pools
Source:  names of vLLM v1/core/kv_cache_manager.py; `invalidate` and `stop_registering` are ours
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.invalidation import OriginPredicate, invalidate, stop_registering
from kvjax.core.requests.request_table import RequestTable


class PrefixCacheControl:
    """The hashes of all pools, and who may register more. Owned by one `KVCacheManager`."""

    def __init__(self, groups: GroupManagers, request_table: RequestTable) -> None:
        self._groups = groups
        self._table = request_table

    def evict_blocks(self, block_ids: npt.ArrayLike | Iterable[int], pool_id: int) -> None:
        """`KVCacheManager.evict_blocks`."""
        pools = self._groups.pools
        if not 0 <= pool_id < len(pools):
            raise ValueError(f"expected pool_id in [0, {len(pools)}), got {pool_id}")
        ids = sorted(block_ids) if isinstance(block_ids, set | frozenset) else block_ids
        pools[pool_id].evict_blocks(ids)  # type: ignore[arg-type]

    def invalidate(self, matches: OriginPredicate) -> int:
        """Forgets the blocks whose origins match, and stops the requests that do; the number of blocks.

        Raises:
            ValueError: origins are not tracked.
        """
        return invalidate(self._groups.pools, self._table, matches)

    def stop_registering(self, predicate: OriginPredicate | None) -> int:
        """`KVCacheManager.stop_registering`."""
        return stop_registering(self._table, predicate)

    def reset(self) -> bool:
        """Forgets all hashes; False, and nothing changes, while any block is held."""
        pools = self._groups.pools
        if any(pool.num_free_blocks != pool.num_usable_blocks for pool in pools):
            return False
        for pool in pools:
            pool.reset_prefix_cache()
        for index in self._groups.sub_block_indices:
            index.clear()
        self._groups.new_step_starts()
        return True


__all__ = ["PrefixCacheControl"]

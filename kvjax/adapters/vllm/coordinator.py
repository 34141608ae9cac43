"""What is read of a manager by group under vLLM's names: which blocks each request holds, and how many are cached.

Flow:    kvjax.core KVCacheManager -> [Coordinator] -> KVCacheManager.coordinator, .single_type_managers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.adapters.vllm.block_pool import BlockPool
from kvjax.core.manager.kv_cache_manager import KVCacheManager as CoreManager
from kvjax.core.pool.kv_cache_blocks import BlockSequence


class ByRequest(Mapping[str, Any]):
    """A value of each running request by its id, read when asked for; what no request of the id has is `missing`."""

    def __init__(self, core: CoreManager, of_row: Callable[[int], Any], missing: Any) -> None:
        self._core = core
        self._of_row = of_row
        self._missing = missing

    def __getitem__(self, request_id: str) -> Any:
        if request_id not in self._core.request_table:
            return self._missing
        return self._of_row(self._core.request_table.row_of(request_id))

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and request_id in self._core.request_table

    def __iter__(self) -> Iterator[str]:
        return (request.request_id for request in self._core.request_table.requests if request is not None)

    def __len__(self) -> int:
        return len(self._core.request_table)

    def get(self, request_id: str, default: Any = None) -> Any:
        """As of a dict: `default` where no request has the id."""
        if request_id not in self:
            return default
        return self[request_id]


class SingleTypeManager:
    """One group of a manager."""

    def __init__(self, core: CoreManager, group_id: int, spec: Any, block_pool: BlockPool) -> None:
        self._core = core
        self._manager, self._place = core.groups.place_of_group(group_id)
        self.kv_cache_group_id = group_id
        self.kv_cache_spec = spec  # vLLM's
        self.block_pool = block_pool
        self.block_size = self._manager.block_size
        self.enable_caching = core.enable_caching
        self.req_to_blocks = ByRequest(core, self._blocks_of, [])
        self.num_cached_block = ByRequest(core, self._num_cached_of, 0)

    def _blocks_of(self, row: int) -> BlockSequence:
        ids = self._core.groups.row_block_ids(row)[self.kv_cache_group_id]
        return BlockSequence(self._core.block_pool, ids)

    def _num_cached_of(self, row: int) -> int:
        return self._manager.num_cached_blocks.item(row)


class Coordinator:
    """All groups of a manager."""

    enable_partial_hash_hits = False  # hits end where blocks end
    num_reprefillable_tokens = 0

    def __init__(self, core: CoreManager, kv_cache_config: Any, block_pool: BlockPool) -> None:
        self._core = core
        self.kv_cache_config = kv_cache_config
        self.block_pool = block_pool
        self.enable_caching = core.enable_caching
        self.single_type_managers = tuple(
            SingleTypeManager(core, group_id, group.kv_cache_spec, block_pool)
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )

    def get_blocks(self, request_id: str) -> tuple[Sequence[Any], ...]:
        """Per group the blocks of a request; none of an unknown one."""
        return tuple(manager.req_to_blocks[request_id] for manager in self.single_type_managers)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[Any]],
        num_encoder_tokens: int = 0,
        total_computed_tokens: int = 0,
        apply_admission_cap: bool = False,
        **others: Any,
    ) -> int:
        """Free blocks that slots for that many tokens would take; `others` are vLLM's, which change nothing here."""
        needs, table = self._core.block_needs, self._core.request_table
        if request_id in table:
            return sum(needs.of_running(table.row_of(request_id), num_tokens, capped=apply_admission_cap))
        ids = tuple(np.array([block.block_id for block in group], np.int32) for group in new_computed_blocks)
        return sum(needs.of_new(num_tokens, ids, total_computed_tokens, apply_admission_cap, num_encoder_tokens))

    def find_longest_cache_hit(
        self, block_hashes: list[Any], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[Any], ...], int]:
        """Per group the blocks of the longest hit of at most that many tokens, and its tokens."""
        ids, num_tokens = self._core.coordinator.find_longest_cache_hit(block_hashes, max_cache_hit_length)
        return self._core.groups.blocks(ids).blocks, num_tokens


__all__ = ["Coordinator"]

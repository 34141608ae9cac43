"""What is read of a manager by group under vLLM's names: which blocks each request holds, and how many are cached.

Flow:    kvjax.core KVCacheManager -> [Coordinator] -> KVCacheManager.coordinator, .single_type_managers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvjax.adapters.vllm.block_pool import BlockPool
from kvjax.adapters.vllm.description import vllm_module
from kvjax.core.kinds.prefix_lookup import PrefixLookup
from kvjax.core.manager.inner_coordinator import InnerKVCacheCoordinator
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


# vLLM's manager class of a spec where it is not named after it.
MANAGERS = {"MLAAttentionSpec": "FullAttentionManager", "SlidingWindowMLASpec": "SlidingWindowManager"}


@cache
def stand_in(ours: type, theirs: type) -> type:
    """A class of ours that `isinstance` takes for vLLM's abstract class, by whose name it goes."""
    cls = type(theirs.__name__, (ours,), {})
    theirs.register(cls)  # type: ignore[attr-defined]
    return cls


class SingleTypeManager:
    """One group of a manager."""

    def __init__(self, core: CoreManager, group_id: int, spec: Any, block_pool: BlockPool) -> None:
        self._core = core
        self._manager, self._place = core.groups.place_of_group(group_id)
        self.kv_cache_group_id = group_id
        self.kv_cache_spec = spec  # vLLM's
        self.block_pool = block_pool
        holds_states = self._manager.kv_cache_spec.state_pages is not None
        self.zeroes_pages = not holds_states
        self.block_size = spec.block_size if holds_states else self._manager.block_size
        self.dcp_world_size = 1 if holds_states else self.block_size // spec.block_size
        self.enable_caching = core.enable_caching
        self.req_to_blocks = ByRequest(core, self._blocks_of, [])
        self.num_cached_block = ByRequest(core, self._num_cached_of, 0)

    def _blocks_of(self, row: int) -> BlockSequence:
        ids = self._core.groups.row_block_ids(row)[self.kv_cache_group_id]
        return BlockSequence(self._core.block_pool, ids)

    def _num_cached_of(self, row: int) -> int:
        return self._manager.num_cached_blocks.item(row)


class SpecGroup(NamedTuple):
    """Groups of one spec that are looked up."""

    spec: Any  # vLLM's
    group_ids: list[int]


class Coordinator:
    """All groups of a manager."""

    def __init__(
        self, core: CoreManager, kv_cache_config: Any, block_pool: BlockPool, num_reprefillable_tokens: int
    ) -> None:
        self._core = core
        self.kv_cache_config = kv_cache_config
        self.block_pool = block_pool
        self.num_reprefillable_tokens = num_reprefillable_tokens
        self.enable_caching = core.enable_caching
        self.hash_block_size = core.hash_block_size
        self.enable_partial_hash_hits = core.groups.has_inner_hits
        self.scheduler_block_size = core.groups.whole_blocks
        self.retention_interval = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.single_type_managers = tuple(
            _manager_class(spec)(core, group_id, spec, block_pool) for group_id, spec in enumerate(specs)
        )
        cacheable = [manager.group_ids for manager, _ in core.groups.cacheable_lookups]
        self.attention_groups = [SpecGroup(specs[group_ids[0]], list(group_ids)) for group_ids in cacheable]
        self.group_block_sizes = tuple(manager.block_size for manager in self.single_type_managers)
        full = [i for i in range(len(specs)) if not core.groups.place_of_group(i)[0].forgets]
        self.full_attention_group_id = full[0] if full else None

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
        ids, num_tokens, _ = self._core.coordinator.find_longest_cache_hit(block_hashes, max_cache_hit_length)
        return self._core.groups.blocks(ids).blocks, num_tokens

    def find_longest_cache_hit_per_group(
        self, block_hashes: list[Any], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[Any], ...], tuple[int, ...]]:
        """Per group the blocks of its own longest hit, and the hit's tokens, whatever the others have."""
        groups, most = self._core.groups, max_cache_hit_length
        if isinstance(self._core.coordinator, InnerKVCacheCoordinator):
            found, inside = self._core.coordinator.find_each(block_hashes, most)
            return groups.blocks(found).blocks, inside
        ids, lengths = list(groups.no_ids), [0] * groups.num_groups
        for manager, drops in groups.cacheable_lookups if self.enable_caching else ():
            num_hashed = len(block_hashes) * self.hash_block_size
            limit = groups.lookup_limit(manager, most, most, num_hashed) if drops else most
            hashes = groups.hashing.of_block_size(block_hashes, manager.block_size)
            hit = manager.find_longest_cache_hit(PrefixLookup(hashes, limit, groups.alignment, drops))
            for place, group_id in enumerate(manager.group_ids):
                ids[group_id], lengths[group_id] = hit[place], hit.shape[1] * manager.block_size
        return groups.blocks(tuple(ids)).blocks, tuple(lengths)

    @property
    def has_states(self) -> bool:
        """Whether a group caches recurrent states."""
        return bool(self._core.groups.state_steps)

    def lags_by_states_alone(self, lengths: Sequence[int], num_tokens: int) -> bool:
        """Whether only groups of states have per-group hits below `num_tokens`."""
        places = [self._core.groups.place_of_group(group_id)[0] for group_id in range(len(lengths))]
        return all(
            length == num_tokens or manager.state_blocks is not None
            for length, manager in zip(lengths, places, strict=True)
        )


def coordinator_class(enable_caching: bool, num_groups: int) -> type[Coordinator]:
    """`Coordinator` under the name of the one that vLLM would make."""
    kind = "Unitary{}" if num_groups == 1 else "Hybrid{}"
    name = (kind if enable_caching else "{}NoPrefixCache").format("KVCacheCoordinator")
    return stand_in(Coordinator, getattr(vllm_module("vllm.v1.core.kv_cache_coordinator"), name))


def _manager_class(spec: Any) -> type[SingleTypeManager]:
    """`SingleTypeManager` under the name of the one that vLLM would make."""
    kind = type(spec).__name__
    name = MANAGERS.get(kind, kind.replace("Spec", "Manager"))
    theirs = getattr(vllm_module("vllm.v1.core.single_type_kv_cache_manager"), name, None)
    return SingleTypeManager if theirs is None else stand_in(SingleTypeManager, theirs)


__all__ = ["Coordinator", "coordinator_class"]

"""What an extender needs of `kvjax.core`: to bring a kind of cache, an eviction policy or a tier, or to look inside."""

from kvjax.core.eviction import CostAwarePolicy, EvictionPolicy, HashedBlocks, LRUPolicy, SegmentedLRUPolicy, StepFlow
from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.hashing.block_hash import (
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvjax.core.kinds.registry import register_kv_cache_spec, registered_specs
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.manager.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from kvjax.core.manager.manager_snapshot import KVCacheManagerSnapshot
from kvjax.core.pool.block import KVCacheBlock
from kvjax.core.pool.block_hash_map import BlockHashToBlockMap
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.cache_tier import CacheTier
from kvjax.core.record.call_recorder import CallRecorder
from kvjax.core.record.call_replay import ReplayedCalls, replay_calls
from kvjax.core.spec import AttentionSpec, KVCacheSpec, WholeSequenceSpec, WindowedSpec
from kvjax.core.watch.evicted_blocks import EvictedBlock

__all__ = [
    "AttentionSpec",
    "BlockHashListWithBlockSize",
    "BlockHashToBlockMap",
    "BlockHashWithGroupId",
    "BlockPool",
    "CacheTier",
    "CallRecorder",
    "CostAwarePolicy",
    "EvictedBlock",
    "EvictionPolicy",
    "FreeKVCacheBlockQueue",
    "HashedBlocks",
    "HybridKVCacheCoordinator",
    "KVCacheBlock",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "KVCacheManagerSnapshot",
    "KVCacheSpec",
    "LRUPolicy",
    "ReplayedCalls",
    "SegmentedLRUPolicy",
    "SingleTypeKVCacheManager",
    "StepFlow",
    "UnitaryKVCacheCoordinator",
    "WholeSequenceSpec",
    "WindowedSpec",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_coordinator",
    "make_block_hash_with_group_id",
    "register_kv_cache_spec",
    "registered_specs",
    "replay_calls",
]

"""Host side of the KV cache: numpy state, no jax."""

from kvjax.core.block import KVCacheBlock
from kvjax.core.block_hash import (
    BlockHash,
    BlockHasher,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvjax.core.block_hash_map import BlockHashToBlockMap
from kvjax.core.block_origins import BlockOrigin
from kvjax.core.block_pool import BlockPool
from kvjax.core.call_recorder import CallRecorder
from kvjax.core.call_replay import ReplayedCalls, replay_calls
from kvjax.core.context_parallel import lengths_of_rank, slots_of_rank
from kvjax.core.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from kvjax.core.evicted_blocks import EvictedBlock
from kvjax.core.eviction import CostAwarePolicy, EvictionPolicy, LRUPolicy, SegmentedLRUPolicy, StepFlow
from kvjax.core.free_queue import FreeKVCacheBlockQueue
from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionManager, ChunkedLocalAttentionSpec
from kvjax.core.kinds.cross_attention import CrossAttentionManager, CrossAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionManager, FullAttentionSpec
from kvjax.core.kinds.mamba import MambaManager, MambaSpec
from kvjax.core.kinds.mla import (
    MLAAttentionManager,
    MLAAttentionSpec,
    SlidingWindowMLAManager,
    SlidingWindowMLASpec,
)
from kvjax.core.kinds.registry import manager_class_of, register_kv_cache_manager, registered_specs
from kvjax.core.kinds.sink_full import SinkFullAttentionManager, SinkFullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowManager, SlidingWindowSpec
from kvjax.core.kv_cache_blocks import KVCacheBlocks
from kvjax.core.kv_cache_manager import KVCacheManager
from kvjax.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.core.manager_snapshot import KVCacheManagerSnapshot
from kvjax.core.miss_reasons import LookupReport, MissReason, MissReasons
from kvjax.core.pins import PinnedPrefix
from kvjax.core.prefix_cache_stats import CachingMetrics, PrefixCacheStats
from kvjax.core.request import LoRARequest, MultiModalFeature, Request
from kvjax.core.request_table import RequestTable
from kvjax.core.residency_metrics import KVCacheMetricsCollector
from kvjax.core.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.spec import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec
from kvjax.core.step_plan import GroupPlan, PageCopies, StepPlan, StepResult, TableUpdate

__all__ = [
    "AllBlocksCleared",
    "AttentionSpec",
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashToBlockMap",
    "BlockHashWithGroupId",
    "BlockHasher",
    "BlockOrigin",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CachingMetrics",
    "CallRecorder",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "CostAwarePolicy",
    "CrossAttentionManager",
    "CrossAttentionSpec",
    "EvictedBlock",
    "EvictionPolicy",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupPlan",
    "HybridKVCacheCoordinator",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "KVCacheEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheManagerSnapshot",
    "KVCacheMetricsCollector",
    "KVCachePoolSpec",
    "KVCacheSpec",
    "LRUPolicy",
    "LoRARequest",
    "LookupReport",
    "MLAAttentionManager",
    "MLAAttentionSpec",
    "MambaManager",
    "MambaSpec",
    "MissReason",
    "MissReasons",
    "MultiModalFeature",
    "PageCopies",
    "PinnedPrefix",
    "PrefixCacheStats",
    "ReplayedCalls",
    "Request",
    "RequestTable",
    "SegmentedLRUPolicy",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SinkFullAttentionSpec",
    "SlidingWindowMLAManager",
    "SlidingWindowMLASpec",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "StepFlow",
    "StepPlan",
    "StepResult",
    "TableUpdate",
    "UnitaryKVCacheCoordinator",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_coordinator",
    "lengths_of_rank",
    "make_block_hash_with_group_id",
    "manager_class_of",
    "register_kv_cache_manager",
    "registered_specs",
    "replay_calls",
    "slots_of_rank",
]

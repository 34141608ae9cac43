"""Host side of the KV cache: numpy state, no jax."""

from kvjax.core.eviction import CostAwarePolicy, EvictionPolicy, HashedBlocks, LRUPolicy, SegmentedLRUPolicy, StepFlow
from kvjax.core.eviction.free_queue import FreeKVCacheBlockQueue
from kvjax.core.hashing.block_hash import (
    BlockHash,
    BlockHasher,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvjax.core.hashing.block_origin import BlockOrigin
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
from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.kinds.sink_full import SinkFullAttentionManager, SinkFullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowManager, SlidingWindowSpec
from kvjax.core.manager.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.manager.manager_snapshot import KVCacheManagerSnapshot
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.core.misses.lookup_report import LookupReport, MissReason
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.pool.block import KVCacheBlock
from kvjax.core.pool.block_hash_map import BlockHashToBlockMap
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.cache_tier import CacheTier
from kvjax.core.pool.kv_cache_blocks import ElsewhereBlocks, ElsewhereHit, KVCacheBlocks
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.record.call_recorder import CallRecorder
from kvjax.core.record.call_replay import ReplayedCalls, replay_calls
from kvjax.core.requests.request import LoRARequest, MultiModalFeature, Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.spec import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec
from kvjax.core.step.context_parallel import lengths_of_rank, slots_of_rank
from kvjax.core.step.mrope_positions import MRopePositions
from kvjax.core.step.step_builder import build_step_plan, logits_requests
from kvjax.core.step.step_drafts import StepDrafts
from kvjax.core.step.step_plan import GroupPlan, StepPlan, StepResult, TableUpdate
from kvjax.core.step.steps_in_flight import StepsInFlight
from kvjax.core.watch.evicted_blocks import EvictedBlock
from kvjax.core.watch.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.core.watch.prefix_cache_stats import CachingMetrics, PrefixCacheStats
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector

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
    "CacheTier",
    "CachingMetrics",
    "CallRecorder",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "CostAwarePolicy",
    "CrossAttentionManager",
    "CrossAttentionSpec",
    "ElsewhereBlocks",
    "ElsewhereHit",
    "EvictedBlock",
    "EvictionPolicy",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupPlan",
    "HashedBlocks",
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
    "MRopePositions",
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
    "StepDrafts",
    "StepFlow",
    "StepPlan",
    "StepResult",
    "StepsInFlight",
    "TableUpdate",
    "UnitaryKVCacheCoordinator",
    "build_step_plan",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_coordinator",
    "lengths_of_rank",
    "logits_requests",
    "make_block_hash_with_group_id",
    "manager_class_of",
    "register_kv_cache_manager",
    "registered_specs",
    "replay_calls",
    "slots_of_rank",
]

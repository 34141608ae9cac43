"""What a scheduler needs of `kvjax.core`: the manager, what it is made from, what it takes and returns."""

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher
from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.cross_attention import CrossAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.kinds.rswa import RSWASpec
from kvjax.core.kinds.sink_full import SinkFullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.core.misses.lookup_report import LookupReport, MissReason
from kvjax.core.misses.miss_reasons import MissReasons
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.options.release_rules import ReleaseRules
from kvjax.core.pool.kv_cache_blocks import ElsewhereBlocks, ElsewhereHit, KVCacheBlocks
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.requests.request import LoRARequest, MultiModalFeature, Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.core.step.context_parallel import lengths_of_rank, slots_of_rank
from kvjax.core.step.mrope_positions import MRopePositions
from kvjax.core.step.step_builder import build_step_plan, logits_requests
from kvjax.core.step.step_drafts import StepDrafts
from kvjax.core.step.step_plan import GroupPlan, StepPlan, StepResult, TableUpdate
from kvjax.core.step.steps_in_flight import StepsInFlight
from kvjax.core.watch.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.core.watch.prefix_cache_stats import CachingMetrics, PrefixCacheStats
from kvjax.core.watch.residency_metrics import KVCacheMetricsCollector

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockHasher",
    "BlockOrigin",
    "BlockRemoved",
    "BlockStored",
    "CachingMetrics",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "ElsewhereBlocks",
    "ElsewhereHit",
    "FullAttentionSpec",
    "GroupPlan",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVCachePoolSpec",
    "LoRARequest",
    "LookupReport",
    "MLAAttentionSpec",
    "MRopePositions",
    "MambaSpec",
    "ManagerOptions",
    "MissReason",
    "MissReasons",
    "MultiModalFeature",
    "PageCopies",
    "PinnedPrefix",
    "PrefixCacheStats",
    "RSWASpec",
    "ReleaseRules",
    "Request",
    "RequestTable",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "StepDrafts",
    "StepPlan",
    "StepResult",
    "StepsInFlight",
    "TableUpdate",
    "build_step_plan",
    "lengths_of_rank",
    "logits_requests",
    "slots_of_rank",
]

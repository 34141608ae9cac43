"""Planning of KV-cache memory: which layers share a block table, which tables share a pool, how many blocks fit.

Flow:    KVCacheSpec per layer, memory budget -> [plan_kv_cache] -> KVCachePlan (its `config` feeds the managers)
No jax: the planner runs where no accelerator is.
"""

from kvjax.planning.grouping import LayerGroup, group_layers
from kvjax.planning.load import Load
from kvjax.planning.parallel import Parallelism, RankShare
from kvjax.planning.plan import KVCachePlan, plan_kv_cache
from kvjax.planning.shape import CacheShape
from kvjax.planning.spec_rules import per_device, promoted
from kvjax.planning.states.idle_states import with_idle_states
from kvjax.planning.states.ring_states import with_ring_states
from kvjax.planning.states.state_blocks import with_state_blocks
from kvjax.planning.summary import GroupPlanSummary, PoolPlan

__all__ = [
    "CacheShape",
    "GroupPlanSummary",
    "KVCachePlan",
    "LayerGroup",
    "Load",
    "Parallelism",
    "PoolPlan",
    "RankShare",
    "group_layers",
    "per_device",
    "plan_kv_cache",
    "promoted",
    "with_idle_states",
    "with_ring_states",
    "with_state_blocks",
]

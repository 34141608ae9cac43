"""Which free block to reuse next: one interface, and a file per policy.

Flow:    BlockPool -> [EvictionPolicy] -> block ids; names of policies -> [make_eviction_policy]
"""

from kvjax.core.eviction.cost_aware import CostAwarePolicy
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.lru import LRUPolicy
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.probation_policy import LearnedPolicy, ProbationLRUPolicy
from kvjax.core.eviction.registry import (
    DEFAULT_POLICY,
    EVICTION_POLICIES,
    FREE_ORDERS,
    RANKED_POLICIES,
    EvictionPolicyFactory,
    make_eviction_policy,
)
from kvjax.core.eviction.segmented_lru import SegmentedLRUPolicy
from kvjax.core.eviction.step_flow import StepFlow

__all__ = [
    "DEFAULT_POLICY",
    "EVICTION_POLICIES",
    "FREE_ORDERS",
    "RANKED_POLICIES",
    "CostAwarePolicy",
    "EvictionPolicy",
    "EvictionPolicyFactory",
    "HashedBlocks",
    "LRUPolicy",
    "LearnedPolicy",
    "ProbationLRUPolicy",
    "SegmentedLRUPolicy",
    "StepFlow",
    "make_eviction_policy",
]

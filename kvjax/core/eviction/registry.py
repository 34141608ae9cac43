"""Policies by name.

Flow:    a name of `EVICTION_POLICIES` | a user's factory -> [make_eviction_policy] -> EvictionPolicy of one pool
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.core.eviction.cost_aware import CostAwarePolicy
from kvjax.core.eviction.hashed_blocks import HashedBlocks
from kvjax.core.eviction.lru import LRUPolicy
from kvjax.core.eviction.policy import EvictionPolicy
from kvjax.core.eviction.probation_policy import LearnedPolicy, ProbationLRUPolicy
from kvjax.core.eviction.segmented_lru import SegmentedLRUPolicy

FREE_ORDERS = ("append", "uncached_first")
EVICTION_POLICIES = ("probation", "learned", "lru", "slru", "cost")
RANKED_POLICIES = ("probation", "learned")  # of pools that share slabs
DEFAULT_POLICY = "learned"
EvictionPolicyFactory = Callable[[HashedBlocks], EvictionPolicy]


def make_eviction_policy(
    policy: str | EvictionPolicyFactory, index: HashedBlocks, free_order: str = "uncached_first"
) -> EvictionPolicy:
    """The policy of the pool whose hashes `index` knows; `free_order` is that of "lru" alone.

    Raises:
        ValueError: no such name, no policy from the factory, or no such free order.
    """
    if free_order not in FREE_ORDERS:
        raise ValueError(f"expected free_order of {', '.join(FREE_ORDERS)}, got {free_order!r}")
    if policy == "lru":
        return LRUPolicy(index, uncached_first=free_order == "uncached_first")
    if policy == "probation":
        return ProbationLRUPolicy(index)
    if policy == "learned":
        return LearnedPolicy(index)
    if policy == "slru":
        return SegmentedLRUPolicy(index)
    if policy == "cost":
        return CostAwarePolicy(index)
    made = policy(index) if callable(policy) else None
    if not isinstance(made, EvictionPolicy):
        raise ValueError(
            f"expected eviction_policy of {', '.join(EVICTION_POLICIES)}, or a callable that makes an EvictionPolicy "
            f"from HashedBlocks, got {policy!r}"
        )
    return made

"""KV that comes into a request's blocks from outside its pool: out of tiers, or from the replica that computed it.

Flow:    BatchedReplay, a request is admitted -> [ExternalKV.start] -> it arrives in virtual time -> the request runs
Source:  the connector's calls in vLLM v1/core/sched/scheduler.py, where a load takes other steps
"""

from __future__ import annotations

from typing import Protocol

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.tiers.connector import LoadResults


class ExternalKV(Protocol):
    """KV from beyond one replica's pools: `ReplayTiers`, `PrefilledKV`."""

    @property
    def is_hit(self) -> bool:
        """Whether its tokens count as prefix hits."""

    @property
    def next_arrival_s(self) -> float:
        """When something that travels arrives next, in virtual seconds; infinite: nothing travels."""

    def start(self, manager: KVCacheManager, request: Request, blocks: KVCacheBlocks, hit: int) -> int | None:
        """Starts the load of what lies behind a hit, in blocks that the request gets; its tokens.

        0: there is nothing, or it is to be asked for later. None: the blocks do not fit.
        """

    def cancel(self, request: Request) -> None:
        """A request whose load has not ended, or has just, gives its blocks up."""

    def step_starts(self) -> LoadResults:
        """Loads that have arrived by now."""

    def step_is_planned(self) -> None:
        """All that the step asks for begins to travel."""


def allocate_external(
    manager: KVCacheManager, request: Request, blocks: KVCacheBlocks, hit: int, num_external_tokens: int
) -> bool:
    """Blocks for a hit and the external tokens behind it, which are no hits of others yet; False: they do not fit."""
    allocated = manager.allocate_slots(
        request,
        0,
        hit,
        blocks,
        num_external_computed_tokens=num_external_tokens,
        delay_cache_blocks=True,
        full_sequence_must_fit=True,
    )
    if allocated is None:
        return False
    request.num_computed_tokens = hit + num_external_tokens
    return True


__all__ = ["ExternalKV", "allocate_external"]

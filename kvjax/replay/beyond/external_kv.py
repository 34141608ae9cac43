"""KV that comes into a request's blocks from outside its pool: out of tiers, or from the replica that computed it.

Flow:    Scheduler, a request is admitted -> [ExternalKV.connector] -> it arrives in virtual time -> the request runs
"""

from __future__ import annotations

from typing import Protocol

from kvjax.engine.scheduling.guarded_connector import LoadConnector
from kvjax.tiers.connector import LoadResults


class ExternalKV(Protocol):
    """KV from beyond one replica's pools: `ReplayTiers`, `PrefilledKV`."""

    @property
    def connector(self) -> LoadConnector:
        """What the scheduler asks for it."""

    @property
    def next_arrival_s(self) -> float:
        """When something that travels arrives next, in virtual seconds; infinite: nothing travels."""

    def num_sent_tokens(self, request_id: str) -> int:
        """Of the tokens that came for a request, those that are no prefix hits."""

    def step_starts(self) -> LoadResults:
        """Loads that have arrived by now."""

    def step_is_planned(self) -> None:
        """All that the step asks for begins to travel."""


__all__ = ["ExternalKV"]

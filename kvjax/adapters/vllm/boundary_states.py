"""Recurrent states that became prefix hits, for a connector that copies them elsewhere.

Flow:    allocate_slots -> [BoundaryStates] -> KVCacheManager.take_boundary_state_offloads -> vLLM's connectors

A state's block leaves its request two steps later, so a connector that reads it holds it first.
"""

from __future__ import annotations

import numpy as np

from kvjax.core.manager.kv_cache_manager import KVCacheManager as CoreManager
from kvjax.core.requests.request import Request

Offer = tuple[int, int, int]  # group, block, tokens before the state


class BoundaryStates:
    """The states that were cached since `take`. A call costs some microseconds for each group of states."""

    def __init__(self, core: CoreManager) -> None:
        self._managers = [manager for manager in core.groups.managers if manager.state_blocks is not None]
        self._num_seen: dict[str, list[int]] = {}  # by running request: columns of each manager
        self._offers: dict[str, list[Offer]] = {}

    def note(self, request: Request) -> None:
        """Offers what a running request has registered since the last call."""
        row = request.row
        seen = self._num_seen.get(request.request_id)
        ends = [manager.num_cached_blocks.item(row) for manager in self._managers]
        self._num_seen[request.request_id] = ends
        for index, manager in enumerate(self._managers):
            start = 0 if seen is None else seen[index]
            columns = np.arange(start, ends[index])
            for group_id, table in zip(manager.group_ids, manager.block_tables[:, row], strict=True):
                ids = table[start : ends[index]]
                for column in columns[manager.fresh_blocks.are_fresh(ids)].tolist():
                    offer = (group_id, int(table[column]), (column + 1) * manager.block_size)
                    self._offers.setdefault(request.request_id, []).append(offer)

    def forget(self, request: Request) -> None:
        """A request ends: its blocks may be reused before a connector holds them."""
        self._num_seen.pop(request.request_id, None)
        self._offers.pop(request.request_id, None)

    def take(self) -> dict[str, list[Offer]]:
        """By request what was offered since the last call."""
        offers, self._offers = self._offers, {}
        return offers


__all__ = ["BoundaryStates"]

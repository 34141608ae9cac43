"""Recurrent states that became prefix hits, for a connector that copies them elsewhere.

Flow:    allocate_slots -> [BoundaryStates] -> KVCacheManager.take_boundary_state_offloads -> vLLM's connectors

A state's block leaves its request two steps later, so a connector that reads it holds it first. Of a state that no
block ends at the copy is offered that keeps it; if its request ends before it writes there again, its own block is.
"""

from __future__ import annotations

import numpy as np

from kvjax.core.kinds.recurrent import RecurrentManager
from kvjax.core.manager.kv_cache_manager import KVCacheManager as CoreManager
from kvjax.core.requests.request import Request

Offer = tuple[int, int, int]  # group, block, tokens before the state


class BoundaryStates:
    """The states that were cached since `take`. A call costs some microseconds for each group of states."""

    def __init__(self, core: CoreManager) -> None:
        self._managers = [manager for manager in core.groups.managers if isinstance(manager, RecurrentManager)]
        self._num_seen: dict[str, list[int]] = {}  # by running request: columns of each manager
        self._offers: dict[str, list[Offer]] = {}

    def note(self, request: Request) -> None:
        """Offers what a running request has registered since the last call."""
        row = request.row
        seen = self._num_seen.get(request.request_id)
        ends = [manager.num_cached_blocks.item(row) for manager in self._managers]
        self._num_seen[request.request_id] = ends
        for index, manager in enumerate(self._managers):
            offers = self._of_copies(manager, row) + self._of_columns(
                manager, row, 0 if seen is None else seen[index], ends[index]
            )
            if offers:
                self._offers.setdefault(request.request_id, []).extend(offers)

    @staticmethod
    def _of_columns(manager: RecurrentManager, row: int, start: int, end: int) -> list[Offer]:
        offers = []
        columns = np.arange(start, end)
        for group_id, table in zip(manager.group_ids, manager.block_tables[:, row], strict=True):
            ids = table[start:end]
            is_offered = manager.fresh_blocks.are_fresh(ids) & manager.block_pool.is_hashed[ids]
            for column in columns[is_offered].tolist():
                offers.append((group_id, int(table[column]), manager.num_tokens_of(row, column)))
        return offers

    @staticmethod
    def _of_copies(manager: RecurrentManager, row: int) -> list[Offer]:
        offers = []
        for place, copies in manager.take_moved_tails(row):
            offers += [
                (group_id, copy, place.num_tokens) for group_id, copy in zip(manager.group_ids, copies, strict=True)
            ]
        return offers

    def take_tails(self, request: Request) -> list[Offer]:
        """The states of a running request that it has not written over, and that no block ends at; once."""
        offers = []
        for manager in self._managers:
            states = manager.inner_states
            place = None if states is None else states.produced.pop(request.row, None)
            if place is not None:
                ids = manager.block_tables[:, request.row, place.column].tolist()
                offers += [(g, block_id, place.num_tokens) for g, block_id in zip(manager.group_ids, ids, strict=True)]
        return offers

    def forget(self, request: Request) -> None:
        """A request ends: its blocks may be reused before a connector holds them."""
        self._num_seen.pop(request.request_id, None)
        self._offers.pop(request.request_id, None)

    def take(self) -> dict[str, list[Offer]]:
        """By request what was offered since the last call."""
        offers, self._offers = self._offers, {}
        return offers


__all__ = ["BoundaryStates"]

"""Requests that go on from another one's tokens and share its blocks: several samples of a prompt, or beams.

Flow:    running request -> [Forks] -> child requests in rows of their own -> page copies where they write
Source:  ARCHITECTURE.md, "Forks"; when a shared block is copied: copy_on_write.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.block_needs import BlockNeeds
from kvjax.core.manager.reservations import Reservations
from kvjax.core.manager.row_blocks import RowBlocks
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.tables.token_counts import as_count


class Forks:
    """Makes children of running requests. Owned by one `KVCacheManager`; a fork costs some microseconds a child."""

    def __init__(
        self,
        groups: GroupManagers,
        needs: BlockNeeds,
        rows: RowBlocks,
        request_table: RequestTable,
        reservations: Reservations | None,
    ) -> None:
        self._groups = groups
        self._needs = needs
        self._rows = rows
        self._table = request_table
        self._reservations = reservations

    def fork(
        self, request: Request, n: int, request_ids: Sequence[str] | None, num_in_flight_tokens: int
    ) -> tuple[Request, ...] | None:
        """`KVCacheManager.fork`."""
        row = self._rows.row_of(request)
        n = as_count("n", n, least=1)
        names = None if request_ids is None else self._checked_names(n, request_ids)
        shared = self._shared_tokens(request, row, as_count("num_in_flight_tokens", num_in_flight_tokens))
        if self._reservations is not None and not self._reservations.admits(
            [n * num_blocks for num_blocks in self._reservations.blocks_of(row)]
        ):
            return None
        if not self._needs.fit(self._needs.of_children(n)):
            return None
        self._rows.register(request, row, self._rows.cacheable_tokens(request, row, shared), shared)
        children = tuple(map(request.fork, names or self._table.new_ids(request.request_id, n)))
        rows = np.array([self._table.add(child) for child in children])
        self._rows.reserve_rows()
        if self._table.skips_registration[row]:
            for child_row in rows.tolist():
                self._table.skip_registration(child_row)
        self._table.num_computed_tokens[rows] = shared
        self._table.num_start_tokens[rows] = self._table.num_start_tokens[row]
        self._table.num_encoder_tokens[rows] = self._table.num_encoder_tokens[row]
        self._rows.share(row, rows, shared)
        return children

    def _checked_names(self, n: int, request_ids: Sequence[str]) -> list[str]:
        names = list(request_ids)
        if len(set(names)) != n or len(names) != n:
            raise ValueError(f"expected {n} distinct request_ids, got {names}")
        for name in names:
            if name in self._table:
                raise ValueError(f"another request with the id {name!r} is running; ids are unique")
        return names

    def _shared_tokens(self, request: Request, row: int, num_in_flight: int) -> int:
        """Tokens whose blocks the children share, checked."""
        name, shared = request.request_id, request.num_computed_tokens - num_in_flight
        if shared < 1:
            raise ValueError(
                f"request {name!r}: expected computed tokens to share, got {request.num_computed_tokens}, "
                f"{num_in_flight} of them in flight; fork it after its first step"
            )
        if shared > request.num_tokens:
            raise ValueError(
                f"request {name!r}: expected to share at most the {request.num_tokens} tokens that are known, got "
                f"{shared}; give the others as num_in_flight_tokens"
            )
        for manager in self._groups.managers:
            manager.check_share(row, shared, num_in_flight)
        return shared


__all__ = ["Forks"]

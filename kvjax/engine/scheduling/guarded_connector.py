"""A scheduler's connector whose exceptions cost the request that it was asked about, and nothing else.

Flow:    Scheduler, LoadingRequests -> [GuardedConnector] -> a connector, perhaps of somebody else

    get_num_new_matched_tokens raises    nothing is loaded: the request is computed
    update_state_after_alloc raises      its load has failed: its blocks are given up, and it is computed
    request_finished raises              it is logged: the request ends all the same
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvjax.core import KVCacheBlocks, Request

logger = logging.getLogger("kvjax.engine")


class LoadConnector(Protocol):
    """What the scheduler asks of a connector: the scheduler's side of `kvjax.tiers.connector`."""

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind a hit; None: ask in the next step."""

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has blocks for them."""

    def request_finished(self, request: Request) -> None:
        """The request gives its blocks up: it has ended, or is preempted while it loads."""


class GuardedConnector:
    """A `LoadConnector` around another one. Costs a microsecond a call."""

    def __init__(self, connector: LoadConnector) -> None:
        self._connector = connector
        self._broken: list[str] = []

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the connector says; (0, False) where it raises."""
        try:
            return self._connector.get_num_new_matched_tokens(request, blocks, num_computed_tokens)
        except Exception:
            logger.exception("a connector raised over request %r, which is computed here", request.request_id)
            return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Tells the connector; where it raises the request is among the broken ones."""
        try:
            self._connector.update_state_after_alloc(request, blocks, num_external_tokens)
        except Exception:
            logger.exception("a connector raised over request %r, which is computed here", request.request_id)
            self._broken.append(request.request_id)
            self.request_finished(request)

    def request_finished(self, request: Request) -> None:
        """Tells the connector."""
        try:
            self._connector.request_finished(request)
        except Exception:
            logger.exception("a connector raised at the end of request %r", request.request_id)

    def take_broken(self) -> list[str]:
        """Requests of which a load could not be begun, since the last call."""
        broken, self._broken = self._broken, []
        return broken


__all__ = ["GuardedConnector", "LoadConnector"]

"""The connector of an engine that computes prompts for others: every request that ends is offered to a peer.

Flow:    Scheduler, a request ends -> [PrefillConnector] -> PageReader -> PageServer.offer -> Ticket
Source:  the producer's side of vLLM's connectors (kv_connector/v1/base.py: request_finished, get_finished)

The blocks of a request that ends are free at once. Their pages are read before the step that is dispatched next, which
is the first that may write them. So the ticket is there after one more `step()` of the engine, even an empty one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.core import KVCacheBlocks, KVCacheManager, Request
from kvjax.device import KVPages, Placement
from kvjax.tiers.connector import ConnectorOutput, LoadResults, RankConnector, WeightsInUse
from kvjax.transfer.no_tier import NoTier
from kvjax.transfer.peers.page_server import PageServer
from kvjax.transfer.request_span import RequestPages, check_rank, request_pages
from kvjax.transfer.senders import Senders
from kvjax.transfer.sent_request import PageReader

MAX_TICKETS = 4096  # that nobody has taken


class _Ended(NamedTuple):
    """A request whose pages are to be read."""

    request: Request
    pages: RequestPages

    def digest(self) -> bytes:
        """What processes compare."""
        return self.pages.digest(self.request.request_id)


class PrefillConnector:
    """A `KVConnector`, both sides in one, but for `PrefillRank`. Owned by the engine's thread.

    Of a request with prompt p that generated tokens t, the KV of all but the last of p + t is offered: a decode engine
    that gets p + t as its prompt has one token to compute. With recurrent layers a request that ended by a token, and
    not by `max_tokens`, has no ticket under asynchronous scheduling: its state has moved on.

    Over several processes each has a connector and a server of its own, and the same tickets.
    """

    works_over_processes = True  # an engine of several processes may have it: each has one of its own

    def __init__(
        self,
        server: PageServer,  # offers what requests leave
        *,
        placement: Placement | None = None,  # of the engine's pages; None: one device
        weights_version: str = "",  # a name for the weights, taken at its word; empty: a digest of them is computed
    ) -> None:
        """A connector without tickets."""
        self.scheduler = self.worker = self
        self._placement = Placement.create() if placement is None else placement
        self._senders = Senders(server, self._placement)
        self._ranks = [PrefillRank(self, rank) for rank in range(self._placement.num_data)]
        self._weights_name = self._weights_version = weights_version
        self._tickets: OrderedDict[str, bytes] = OrderedDict()  # by age
        self._ended: list[_Ended] = []

    def take_ticket(self, request_id: str) -> bytes:
        """The signed ticket of a request that ended before the last step; it is forgotten here.

        Raises:
            KeyError: the request has no ticket: it has not ended, was taken already, or no step ran since.
        """
        if request_id not in self._tickets:
            raise KeyError(f"request {request_id!r} has no ticket; run a step() after its end")
        return self._tickets.pop(request_id)

    # -- StepConnector, of all data ranks -----------------------------------------------------------------------------

    def build_connector_meta(self) -> Sequence[_Ended]:
        """The requests that ended since the last step."""
        ended, self._ended = self._ended, []
        return ended

    def update_connector_output(self, output: ConnectorOutput) -> LoadResults:
        """Nothing is loaded here."""
        return LoadResults((), ())

    def bind(self, manager: KVCacheManager) -> None:
        """A rank's manager is there: all ranks' are of one layout, and nothing is in flight."""
        self._ended = []
        self._reader = PageReader(manager.kv_cache_config, self._placement, weights_version=self._weights_version)

    def add_ended(self, request: Request, pages: RequestPages) -> None:
        """A request's pages are to be read before the next step."""
        self._ended.append(_Ended(request, pages))

    # -- WorkerConnector --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """False: what is read is offered at once."""
        return False

    def warmup(self, pages: KVPages) -> KVPages:
        """The pages. Programs depend on lengths of requests, and are compiled when one first comes."""
        return pages

    def start_load_kv(self, pages: KVPages, metadata: Sequence[_Ended]) -> KVPages:
        """Reads what ended, and offers it. Of tickets that nobody takes the newest are kept."""
        for request, table in metadata:
            sent = self._reader.read(pages, table)
            self._tickets[request.request_id] = self._senders.offer(sent, request, table.rank)
            while len(self._tickets) > MAX_TICKETS:
                self._tickets.popitem(last=False)
        return pages

    def get_finished(self) -> ConnectorOutput:
        """Nothing is loaded here."""
        return ConnectorOutput()

    def wait(self) -> None:
        """There is nothing to wait for."""

    # -- KVConnector ------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where the engine's pages lie, which the engine checks."""
        return self._placement

    def use_weights(self, weights: WeightsInUse) -> None:
        """Offers say that they are of this model and these weights, from the next `bind` on."""
        self._weights_version = weights.text(self._weights_name)

    def of_rank(self, rank: int) -> RankConnector:
        """The scheduler's side of one data rank.

        Raises:
            ValueError: the placement has fewer.
        """
        check_rank(rank, self._placement)
        return self._ranks[rank]

    def reset(self, *, forget: bool = True) -> None:
        """Requests that ended and were not read are lost with the pages; tickets stay."""
        self._ended = []

    def close(self) -> None:
        """Nothing to end: the server is its maker's."""


class PrefillRank:
    """A `RankConnector` and its `SchedulerConnector`."""

    def __init__(self, connector: PrefillConnector, rank: int) -> None:
        self.tier = NoTier()
        self.scheduler = self
        self._connector, self._rank = connector, rank
        self._manager: KVCacheManager | None = None
        self._has_states = False

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Reads this manager's tables from here on."""
        self._manager = manager
        groups = manager.kv_cache_config.kv_cache_groups
        self._has_states = any(group.kv_cache_spec.state_pages is not None for group in groups)
        self._connector.bind(manager)

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is loaded here."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing is loaded here."""

    def request_finished(self, request: Request) -> None:
        """Notes the pages of the request's tokens, but for its last one, which no step has computed."""
        num_tokens = request.num_tokens - 1
        if self._manager is None or request.row < 0 or not 0 < num_tokens <= request.num_computed_tokens:
            return  # it never ran, or ended in its prompt
        if request.num_computed_tokens > num_tokens and self._has_states:
            return  # a step in flight moves the state on
        pages = request_pages(self._manager, request.row, 0, num_tokens, self._rank)
        self._connector.add_ended(request, pages)

    def build_connector_meta(self) -> Sequence[_Ended]:
        """As of the connector."""
        return self._connector.build_connector_meta()

    def update_connector_output(self, output: ConnectorOutput) -> LoadResults:
        """As of the connector."""
        return self._connector.update_connector_output(output)


__all__ = ["PrefillConnector", "PrefillRank"]

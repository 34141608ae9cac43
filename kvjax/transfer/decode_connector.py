"""The connector of an engine that decodes what others computed: requests with a ticket load their KV from a peer.

Flow:    Ticket -> [DecodeConnector.expect]; Scheduler, a request is admitted -> [DecodeConnector] -> PageClient.pull ->
         Arrival -> PageWriter.write -> the request runs
Source:  the consumer's side of vLLM's connectors (kv_connector/v1/base.py)

    expected --admitted--> asked for --arrived--> written --reported--> it runs
        |                      |--lost, late or refused--> failed: its tokens are computed here
        |                      |--aborted--> dropped: what arrives is not written
        |--of another request--> refused: nothing is asked for, its tokens are computed here

A load is written in one step and reported in the next, so its pages are whole before a step attends to them.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvjax.core import KVCacheBlocks, KVCacheManager, Request
from kvjax.device import KVPages, Placement
from kvjax.device.mesh.processes import ProcessBoard, spans_processes
from kvjax.errors import TransferError
from kvjax.tiers.connector import ConnectorOutput, LoadResults, RankConnector, WeightsInUse
from kvjax.tiers.processes.reports import Reports
from kvjax.tiers.worker.pace import PieceState
from kvjax.transfer.load_pace import CommonLoads, LoadPace, OwnLoads
from kvjax.transfer.no_tier import NoTier
from kvjax.transfer.peers.arrival import Arrival
from kvjax.transfer.peers.page_client import PageClient
from kvjax.transfer.peers.ticket import Ticket
from kvjax.transfer.request_span import RequestPages, check_rank, request_pages
from kvjax.transfer.sent_request import PageWriter

PAUSE_S = 5e-4  # between looks at arrivals, in `wait`
MAX_TICKETS = 65_536  # that are expected; the oldest are forgotten first

logger = logging.getLogger("kvjax.transfer")


@dataclass(frozen=True)
class _Load:
    """One request's tokens from a peer."""

    load_id: int
    ticket: Ticket
    pages: RequestPages

    def digest(self) -> bytes:
        """What processes compare."""
        return self.pages.digest(f"load {self.load_id}")


@dataclass(frozen=True)
class DecodeMeta:
    """What the worker is to do before the next step."""

    starts: tuple[_Load, ...] = ()
    cancelled: tuple[int, ...] = ()

    def digest(self) -> bytes:
        """What processes compare."""
        return b"".join(load.digest() for load in self.starts) + repr(self.cancelled).encode()


@dataclass
class _Pulling:
    """A load that the worker is at."""

    ticket: Ticket
    pages: RequestPages
    arrival: Arrival
    number: int  # of the pace


@dataclass
class _Report:
    """What the worker has done since the last `get_finished`."""

    written: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


class DecodeConnector:
    """A `KVConnector`, both sides in one, but for `DecodeRank`. Owned by the engine's thread; only `wait` waits.

    Over several processes each has a connector and a client of its own, all expect the same tickets, and a load counts
    once all processes have their parts of it.
    """

    works_over_processes = True  # an engine of several processes may have it: each has one of its own

    def __init__(
        self,
        client: PageClient,  # fetches what tickets name
        *,
        placement: Placement | None = None,  # of this engine's pages; None: one device
        weights_version: str = "",  # a name for the weights, taken at its word; empty: a digest of them is computed
        timeout_s: float = 60.0,  # after which a load that was asked for has failed
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A connector without tickets."""
        self.scheduler = self.worker = self
        self.num_failed = 0  # loads, since the start
        self.num_refused = 0  # tickets of other tokens, salts or adapters than the request's, since the start
        self._client = client
        self._placement = Placement.create() if placement is None else placement
        self._pace: LoadPace = OwnLoads(timeout_s, clock)
        if spans_processes(self._placement.mesh):
            self._pace = CommonLoads(Reports(ProcessBoard(), timeout_s=timeout_s, clock=clock))
        self._ranks = [DecodeRank(self, rank) for rank in range(self._placement.num_data)]
        self._weights_name = self._weights_version = weights_version
        self._bound_writer: PageWriter | None = None  # until an engine has this connector
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()  # by age
        self._num_loads = 0
        self._start()

    def _start(self) -> None:
        self._starts: list[_Load] = []
        self._cancelled: list[int] = []
        self._load_of: dict[str, int] = {}  # request -> its load, until it has ended
        self._pulling: dict[int, _Pulling] = {}
        self._report = _Report()

    def expect(self, request_id: str, ticket: bytes) -> None:
        """The request of this id, which is added next, finds its first tokens at a peer.

        Its prompt begins with the tokens that the peer computed, and has at least one more. A request without a ticket
        is computed here, and so is one whose tokens, salt, adapter or inputs are not those of its ticket.

        Raises:
            ValueError: the bytes are no ticket or of another key, of other layers or weights than this engine's, or
                there is no engine. Nothing is expected.
        """
        found = self._client.read(ticket)
        self._writer.check(found.header)
        self._tickets[request_id] = found
        while len(self._tickets) > MAX_TICKETS:
            self._tickets.popitem(last=False)

    # -- StepConnector, of all data ranks -----------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """A rank's manager is there: all ranks' are of one layout, and nothing is in flight."""
        self._start()
        self._bound_writer = PageWriter(manager.kv_cache_config, self._placement, weights_version=self._weights_version)

    def ticket_of(self, request_id: str) -> Ticket | None:
        """What is expected for a request."""
        return self._tickets.get(request_id)

    def checked_ticket_of(self, request: Request) -> Ticket | None:
        """What is expected for a request, compared with it: a ticket of something else is dropped."""
        ticket = self.ticket_of(request.request_id)
        if ticket is None or self._client.matches(ticket, request):
            return ticket
        self.num_refused += 1
        logger.warning("the ticket of request %r is of other tokens, salt, adapter or inputs", request.request_id)
        self.drop_ticket(request.request_id)
        return None

    def drop_ticket(self, request_id: str) -> None:
        """The request is computed here, or has ended."""
        self._tickets.pop(request_id, None)

    def num_lacking(self, pages: RequestPages, ticket: Ticket) -> tuple[int, ...]:
        """As of the writer."""
        return self._writer.num_lacking(pages, ticket.header)

    def start_load(self, request_id: str, pages: RequestPages) -> None:
        """Asks for a request's tokens with the next metadata."""
        ticket = self._tickets.pop(request_id)
        load_id, self._num_loads = self._num_loads, self._num_loads + 1
        self._load_of[request_id] = load_id
        self._starts.append(_Load(load_id, ticket, pages))

    def cancel_load(self, request_id: str) -> None:
        """The request's load, if any, writes nothing more."""
        load_id = self._load_of.pop(request_id, None)
        if load_id is not None:
            self._starts = [load for load in self._starts if load.load_id != load_id]
            self._cancelled.append(load_id)

    def build_connector_meta(self) -> tuple[DecodeMeta, ...]:
        """Loads to start and to drop, if there are any."""
        meta = DecodeMeta(tuple(self._starts), tuple(self._cancelled))
        self._starts, self._cancelled = [], []
        return (meta,) if meta.starts or meta.cancelled else ()

    def update_connector_output(self, output: ConnectorOutput) -> LoadResults:
        """Whose loads have ended. A load that the worker neither has nor reports is lost, and failed."""
        known = output.finished_recving.keys() | output.pending_recving | {load.load_id for load in self._starts}
        ended = {
            request_id: load_id
            for request_id, load_id in self._load_of.items()
            if load_id in output.finished_recving or load_id in output.failed_recving or load_id not in known
        }
        for request_id in ended:
            del self._load_of[request_id]
        loaded = tuple(name for name, load_id in ended.items() if load_id in output.finished_recving)
        failed = tuple(name for name, load_id in ended.items() if load_id not in output.finished_recving)
        self.num_failed += len(failed)
        return LoadResults(loaded, failed)

    # -- WorkerConnector --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a load is in flight, or not reported."""
        return bool(self._pulling or self._report.written or self._report.failed)

    def warmup(self, pages: KVPages) -> KVPages:
        """The pages. Programs depend on lengths of requests, and are compiled when one first comes."""
        return pages

    def start_load_kv(self, pages: KVPages, metadata: Sequence[DecodeMeta]) -> KVPages:
        """Asks peers for what is new, and writes what has arrived."""
        for meta in metadata:
            for load in meta.starts:
                arrival = self._asked(load)
                self._pulling[load.load_id] = _Pulling(load.ticket, load.pages, arrival, self._pace.watch(arrival))
            for load_id in meta.cancelled:
                if load_id in self._pulling:
                    self._drop(self._pulling.pop(load_id))
        for load_id, pulling in list(self._pulling.items()):
            state = self._pace.state_of(pulling.number)
            if state is not PieceState.ON_ITS_WAY:
                del self._pulling[load_id]
                pages = self._written(pages, load_id, pulling, state)
        return pages

    def get_finished(self) -> ConnectorOutput:
        """Loads that were written or have failed since the last call."""
        self._pace.begin_turn()
        report, self._report = self._report, _Report()
        return ConnectorOutput(report.written, frozenset(report.failed), frozenset(self._pulling))

    def wait(self) -> None:
        """Waits until a load has arrived, or is late."""
        while self._pulling and not self._report.written and not self._report.failed:
            if any(pulling.arrival.is_ready for pulling in self._pulling.values()):
                return
            time.sleep(PAUSE_S)
            if self._pace.must_be_asked:
                return

    # -- KVConnector ------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where the engine's pages lie, which the engine checks."""
        return self._placement

    def use_weights(self, weights: WeightsInUse) -> None:
        """Tickets of other models and weights are refused, from the next `bind` on."""
        self._weights_version = weights.text(self._weights_name)

    def of_rank(self, rank: int) -> RankConnector:
        """The scheduler's side of one data rank.

        Raises:
            ValueError: the placement has fewer.
        """
        check_rank(rank, self._placement)
        return self._ranks[rank]

    def reset(self, *, forget: bool = True) -> None:
        """Drops all that is in flight; tickets of requests that were not admitted stay."""
        for pulling in self._pulling.values():
            self._drop(pulling)
        self._start()

    def close(self) -> None:
        """Drops all that is in flight; the client is its maker's."""
        self.reset()

    @property
    def _writer(self) -> PageWriter:
        if self._bound_writer is None:
            raise ValueError(
                "expected the connector of an engine, got one of none; make LLMEngine(connector=...) first"
            )
        return self._bound_writer

    def _asked(self, load: _Load) -> Arrival:
        """A pull that has begun, or one that has failed, of whatever kind: it costs the request its load."""
        try:
            return self._client.pull(load.ticket, self._writer, load.pages.rank)
        except Exception as error:
            return Arrival.failed(load.ticket, error)

    def _drop(self, pulling: _Pulling) -> None:
        pulling.arrival.cancel()
        self._pace.forget(pulling.number)

    def _written(self, pages: KVPages, load_id: int, pulling: _Pulling, state: PieceState) -> KVPages:
        """Pages with a load that has arrived everywhere, or the same pages and a failure."""
        try:
            sent = pulling.arrival.wait(0.0)
            if state is not PieceState.THERE:
                raise TransferError(f"another process's part is {state.value}")
            pages = self._writer.write(pages, pulling.pages, sent)
        except (TransferError, ValueError) as error:  # no page was written
            self._drop(pulling)
            self._fail(load_id, error)
        else:
            self._report.written[load_id] = 1
            if self._writer.spans_processes:
                self._client.release(pulling.ticket)
        return pages

    def _fail(self, load_id: int, error: Exception) -> None:
        logger.warning("a load from a peer failed: %s", error)
        self._report.failed.add(load_id)


class DecodeRank:
    """A `RankConnector` and its `SchedulerConnector`: requests of one data rank, whose entries go to its pages."""

    def __init__(self, connector: DecodeConnector, rank: int) -> None:
        self.tier = NoTier()
        self.scheduler = self
        self._connector, self._rank = connector, rank
        self._manager: KVCacheManager | None = None

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Writes into this manager's blocks from here on; nothing is in flight."""
        self._manager = manager
        self._connector.bind(manager)

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The tokens of the request's ticket behind its hit."""
        ticket = self._connector.checked_ticket_of(request)
        if ticket is None or self._manager is None:
            return 0, False
        num_tokens = ticket.header.stop - num_computed_tokens
        groups = range(len(self._manager.kv_cache_config.kv_cache_groups))
        is_at_block = all(num_computed_tokens % self._manager.block_size(group_id) == 0 for group_id in groups)
        if num_tokens <= 0 or ticket.header.stop >= request.num_tokens or not is_at_block:
            self._connector.drop_ticket(request.request_id)
            return 0, False
        return num_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Asks for the request's tokens, whose blocks it has."""
        ticket = self._connector.ticket_of(request.request_id)
        if not num_external_tokens or ticket is None or self._manager is None:
            return
        stop = ticket.header.stop
        pages = request_pages(self._manager, request.row, stop - num_external_tokens, stop, self._rank)
        for group_id, num_lacking in enumerate(self._connector.num_lacking(pages, ticket)):
            self._manager.leave_unregistered(request, group_id, num_lacking)
        self._connector.start_load(request.request_id, pages)

    def request_finished(self, request: Request) -> None:
        """Its load, if any, writes nothing more; its ticket is void."""
        self._connector.drop_ticket(request.request_id)
        self._connector.cancel_load(request.request_id)

    def build_connector_meta(self) -> tuple[DecodeMeta, ...]:
        """As of the connector."""
        return self._connector.build_connector_meta()

    def update_connector_output(self, output: ConnectorOutput) -> LoadResults:
        """As of the connector."""
        return self._connector.update_connector_output(output)


__all__ = ["DecodeConnector", "DecodeMeta", "DecodeRank"]

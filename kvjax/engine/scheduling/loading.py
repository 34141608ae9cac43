"""Requests whose blocks are being loaded from beyond the pools: they own a row and blocks, and no step computes them.

Flow:    Scheduler, first waiting request -> [LoadingRequests.start] -> connector -> [LoadingRequests.end] -> it runs
Source:  WAITING_FOR_REMOTE_KVS of vLLM v1/core/sched/scheduler.py

A request loads all that the connector has behind its hit, in blocks of its own that are no hits before they are
loaded. Then it runs from there. If the load fails it gives its blocks up, waits in its place, and is not loaded again.
It gives them up too where a more urgent request lacks blocks; its load is cancelled, and it is asked for once more when
it is admitted again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import islice

from kvjax.core import KVCacheBlocks, KVCacheManager
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.scheduling.admission import Admission
from kvjax.engine.scheduling.guarded_connector import GuardedConnector
from kvjax.engine.scheduling.running_inputs import RunningInputs

ASK_AHEAD = 16  # requests behind one that waits for an answer


class LoadStart(enum.Enum):
    """What became of a request that might be loaded."""

    COMPUTED = "computed"  # there is nothing to load
    LOADING = "loading"
    LATER = "later"  # it is to be asked for in the next step
    REFUSED = "refused"  # its blocks do not fit


class LoadingRequests:
    """Loads of one scheduler, which owns it."""

    def __init__(
        self, manager: KVCacheManager, connector: GuardedConnector, admission: Admission, inputs: RunningInputs
    ) -> None:
        self.loaded: list[EngineRequest] = []  # may run; they own rows still
        self._loading: dict[str, EngineRequest] = {}
        self._manager = manager
        self._connector = connector
        self._admission = admission
        self._inputs = inputs
        self._asked_behind = ""  # the request behind which others were looked up last

    def __len__(self) -> int:
        return len(self._loading) + len(self.loaded)

    @property
    def requests(self) -> list[EngineRequest]:
        """All that own a row and do not run."""
        return [*self._loading.values(), *self.loaded]

    def start(self, engine_request: EngineRequest, blocks: KVCacheBlocks, num_hit: int, *, is_first: bool) -> LoadStart:
        """Allocates blocks of a waiting request, whose inputs fit, for its hit and what is loaded; starts the load."""
        request = engine_request.request
        num_external, _ = self._connector.get_num_new_matched_tokens(request, blocks, num_hit)
        if num_external is None:
            return LoadStart.LATER
        if not num_external:
            return LoadStart.COMPUTED
        if not self._admission.allocate(
            engine_request, 0, num_hit, blocks, is_first=is_first, num_external_tokens=num_external
        ):
            return LoadStart.REFUSED
        request.num_computed_tokens = num_hit + num_external
        self._connector.update_state_after_alloc(request, blocks, num_external)
        self._inputs.start(request.row, engine_request.inputs, request.num_computed_tokens)
        engine_request.status = RequestStatus.LOADING
        self._loading[request.request_id] = engine_request
        return LoadStart.LOADING

    def ask_ahead(self, waiting: Iterable[EngineRequest]) -> None:
        """Looks up the requests behind the first, so that a connector which has to ask somebody asks for all at once.

        Once for each first request; without this each would wait for an answer of its own.
        """
        first, *others = islice(waiting, 1 + ASK_AHEAD)
        if self._asked_behind != first.request_id:
            self._asked_behind = first.request_id
            for one in others:
                if not one.waits_for_first_sample:
                    self._manager.get_computed_blocks(one.request)

    def end(self, loaded: Iterable[str], failed: Iterable[str]) -> list[EngineRequest]:
        """Loads have ended: blocks that are loaded are hits; the requests whose load failed, which wait again.

        Requests of other data ranks are passed over. Loads that the connector could not begin have failed, too.
        """
        failed = {**dict.fromkeys(failed), **dict.fromkeys(self._connector.take_broken())}
        for request_id in filter(self._loading.__contains__, (one for one in loaded if one not in failed)):
            one = self._loading.pop(request_id)
            self._manager.cache_blocks(one.request, one.request.num_computed_tokens)
            self.loaded.append(one)
        waiting = []
        for request_id in filter(self._loading.__contains__, failed):
            one = self._loading.pop(request_id)
            self._give_up(one)
            one.status = RequestStatus.WAITING
            one.has_failed_load = True
            waiting.append(one)
        return waiting

    def take_loaded(self) -> list[EngineRequest]:
        """Takes out the requests that may run."""
        loaded, self.loaded = self.loaded, []
        return loaded

    def cancel(self, engine_request: EngineRequest) -> None:
        """Takes row and blocks of a request that is loading, or is loaded and does not run yet.

        They may be given to others at once: what the connector writes from the next step on leaves them alone.
        """
        self._connector.request_finished(engine_request.request)
        self._loading.pop(engine_request.request_id, None)
        self.loaded = [one for one in self.loaded if one is not engine_request]
        self._give_up(engine_request)

    def _give_up(self, engine_request: EngineRequest) -> None:
        request = engine_request.request
        self._inputs.stop(request.row)
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1  # if it is looked up again, that is no first lookup
        self._admission.refusal = None


__all__ = ["LoadStart", "LoadingRequests"]

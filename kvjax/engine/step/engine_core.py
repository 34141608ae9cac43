"""Steps that are whole or undone: a host loop and a model runner that outlive any exception.

Flow:    LLMEngine -> [EngineCore.step] -> HostLoop.begin_step -> ModelRunner -> HostLoop.end_step -> StepOutputs

A step, a warm-up, a request that is queued or aborted: each is a change. An exception in the middle of one, or a
KeyboardInterrupt between any two of its lines, leaves requests, blocks and pages between two states, and donated pages
gone. Then everything but the requests is made anew: pages, manager, scheduler. The prefix cache is empty, so nothing
that was computed in part is ever a hit. Unfinished requests wait again, in their order, with the tokens that were
handed over (recovery.py), and the next step goes on with them.

    whole        between two changes
    broken off   a change has begun and not ended: the next call restarts, as the exception's handler does
    closed       the restart failed: every call tries it again, and raises EngineClosedError
    alone        a process that shares the mesh is gone: every call raises PeerLostError

Outputs have reached the caller of `step` when it makes the next call after one that returned. Those of a step that was
broken off when all its tokens were with their requests are returned by the next `step`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from kvjax.engine.requests.outputs import NO_OUTPUTS, GenerationResult, StepOutputs
from kvjax.engine.requests.token_stream import StreamInbox
from kvjax.engine.step.agreement import Agreement
from kvjax.engine.step.engine_log import EngineObserver, StepLog, log_restart, logger
from kvjax.engine.step.host_loop import HostLoop
from kvjax.engine.step.model_runner import ModelRunner
from kvjax.engine.step.rank_loops import RankLoops
from kvjax.errors import EngineClosedError, PeerLostError
from kvjax.tiers.connector import KVConnector

AnyLoop: TypeAlias = HostLoop | RankLoops  # of one data rank, of several


class EngineCore:
    """What an LLMEngine runs. Owned by one thread; the care for exceptions costs a microsecond a step."""

    def __init__(
        self,
        runner: ModelRunner,
        new_loop: Callable[[], AnyLoop],
        max_steps_in_flight: int,
        connector: KVConnector | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """`new_loop` makes a loop without requests, whose manager is of the runner's layout and knows the connector.

        `agreement` is that of the processes that share the runner's mesh; None: it is this process's alone.
        """
        self.runner = runner
        self.connector = connector
        self.loop = new_loop()
        self.inboxes: list[StreamInbox] = []  # of `generate` and of open streams
        self.observers: list[EngineObserver] = [StepLog()]
        self._new_loop = new_loop
        self._agreement = agreement
        self._max_steps_in_flight = max_steps_in_flight
        self._is_whole = True

    @property
    def ids_in_use(self) -> Container[str]:
        """Ids of requests that are unfinished, or that ended in a step whose outputs nobody has yet."""
        undelivered = self.loop.undelivered
        if undelivered is None or undelivered.outputs is None:
            return self.loop.requests
        return {*self.loop.requests, *(result.request_id for result in undelivered.outputs.results.values())}

    def step(self) -> StepOutputs:
        """Runs one step, after those of closed inboxes are aborted; its outputs go to all inboxes too.

        Raises:
            EngineClosedError, PeerLostError: as `recover`.
            ValueError: steps that engines share have weights that this one was not told of. Nothing is changed.
            BaseException: whatever was raised in the step, which is undone.
        """
        self.sweep()
        self.runner.check_weights()
        self._begin()
        try:
            outputs = self._run()
            for inbox in self.inboxes:
                inbox.put(outputs)
            self._is_whole = True
            if outputs is not NO_OUTPUTS and self.loop.step_stats:
                self._tell(lambda observer: observer.step_ended(self.loop.step_stats[-1], outputs))
            return outputs
        except BaseException as error:
            self._break_off(error)
            raise

    def advance(self) -> bool:
        """Runs a step for the inboxes; False: there is nothing to run."""
        self.sweep()
        if not self.loop.scheduler.num_unfinished and not self.runner.num_in_flight:
            return False
        self.step()
        return True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A change of requests or pages."""
        self._begin()
        try:
            yield
            self._is_whole = True
        except BaseException as error:
            self._break_off(error)
            raise

    def sweep(self) -> None:
        """Makes whole what was broken off, and aborts the unfinished requests of closed inboxes."""
        self.recover()
        if not any(inbox.is_closed for inbox in self.inboxes):
            return
        for inbox in self.inboxes:
            if inbox.is_closed:
                with self.changing():
                    for request_id in inbox.places:
                        if request_id in self.loop.requests:
                            self.abort(request_id)
        self.inboxes = [inbox for inbox in self.inboxes if not inbox.is_closed]

    def abort(self, request_id: str) -> GenerationResult:
        """Ends an unfinished request, within a change."""
        result = self.loop.abort(request_id)
        self._tell(lambda observer: observer.request_aborted(result))
        return result

    def recover(self) -> None:
        """Restarts if a change was broken off.

        Raises:
            EngineClosedError: the device gives no memory for pages. May be called again.
            PeerLostError: a process that shares the mesh is gone.
        """
        if not self._is_whole:
            self._check_peers()
            self._restart()

    def reset(self) -> list[GenerationResult]:
        """Aborts all requests and forgets everything cached; what the requests had so far, in order of arrival.

        Raises:
            EngineClosedError: as `recover`.
        """
        self._begin()
        self._restart()
        for inbox in self.inboxes:
            inbox.is_closed = True
        self.inboxes = []
        self.loop.undelivered = None
        with self.changing():
            return [self.abort(request_id) for request_id in list(self.loop.requests)]

    def _run(self) -> StepOutputs:
        loop, runner = self.loop, self.runner
        if loop.undelivered is not None:
            return loop.deliver()
        connector = self.connector
        if connector is not None:
            self._ask(connector, self._end_loads)
        step = loop.begin_step()
        if connector is not None:
            self._ask(connector, self._start_loads)
        if step is not None:
            if self._agreement is not None:
                self._agreement.note(step)
            runner.dispatch(step)
        num_in_flight = runner.num_in_flight
        if num_in_flight and (step is None or num_in_flight >= self._max_steps_in_flight):
            return loop.end_step(*runner.read())
        if connector is not None and step is None and loop.scheduler.num_unfinished:
            connector.worker.wait()
        return NO_OUTPUTS

    def _end_loads(self, connector: KVConnector) -> None:
        output = connector.worker.get_finished()
        self.loop.scheduler.end_loads(*connector.scheduler.update_connector_output(output))

    def _start_loads(self, connector: KVConnector) -> None:
        metadata = connector.scheduler.build_connector_meta()
        if self._agreement is not None:
            self._agreement.note_transfers(metadata)
        self.runner.pages = connector.worker.start_load_kv(self.runner.pages, metadata)

    def _ask(self, connector: KVConnector, question: Callable[[KVConnector], None]) -> None:
        """Asks the connector. If it raises, and the pages are there, its loads have failed, and the cache stays.

        Among processes the step is broken off: the others' connectors may not have raised.
        """
        try:
            question(connector)
        except Exception:
            if self._agreement is not None or not self.runner.has_pages:
                raise
            logger.exception("a connector raised; what it was loading is computed here")
            connector.reset()
            for rank, manager in enumerate(self.loop.managers):
                connector.of_rank(rank).scheduler.bind_kv_cache_manager(manager)
            self.loop.scheduler.end_loads((), list(self.loop.requests))  # those that load

    def _begin(self) -> None:
        """A change begins. Its caller has the outputs of the step before."""
        if self._is_whole:
            self.loop.step_end = None
        self._is_whole = False

    def _break_off(self, error: BaseException) -> None:
        """Restarts now, so that nothing is held meanwhile. If that fails too, the next call tries again."""
        self._is_whole = False
        if isinstance(error, PeerLostError):
            return
        self._check_peers(error)
        traceback.clear_frames(error.__traceback__)  # they may hold pages, and there may not be room for both
        with suppress(EngineClosedError):
            self._restart()
            if self.loop.step_stats or self.loop.scheduler.num_unfinished:  # else there was nothing to lose
                log_restart(error, self.loop.scheduler.num_unfinished)

    def _check_peers(self, error: BaseException | None = None) -> None:
        """Raises PeerLostError, from `error`, where one of several processes is gone: no restart brings it back."""
        if self._agreement is not None:
            self._agreement.check_peers(error)

    def _tell(self, news: Callable[[EngineObserver], object]) -> None:
        for observer in self.observers:
            try:
                news(observer)
            except Exception:  # whatever an observer does wrong is not the requests' business
                logger.exception("an observer of the engine raised")

    def _restart(self) -> None:
        try:
            if self.connector is not None:
                self.connector.reset()
            self.runner.reset()
            loop = self._new_loop()
        except Exception as error:
            raise EngineClosedError(
                f"the engine is closed: a call was broken off, and the device gives no memory for new pages ({error}); "
                "call reset() when it has some, or make a new engine"
            ) from error
        loop.take_over(self.loop)  # type: ignore[arg-type]  # one `new_loop` made both
        if self.inboxes and loop.undelivered is not None and loop.undelivered.outputs is not None:
            for inbox in self.inboxes:
                inbox.put(loop.undelivered.outputs)
            loop.undelivered = None
        self.loop = loop
        self._is_whole = True


__all__ = ["EngineCore"]

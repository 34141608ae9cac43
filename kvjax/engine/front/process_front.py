"""Requests of an engine that runs in several processes, through one of them; what is owed outlives them all.

Flow:    submit on process 0 -> journal -> [ProcessFront: a turn, told to all] -> LLMEngine of each -> answers
Source:  docs/clusters.md

    engine = LLMEngine(model, config, mesh=mesh)
    front = ProcessFront(engine, "owed", on_result=write_down)
    if front.takes_requests:                      # process 0
        threading.Thread(target=take_requests, args=(front,)).start()
    front.serve()                                 # every process, until process 0 closes its front

Each turn process 0 takes what was submitted, tells the others, and all of them queue the same and run a step. Nothing
is told over the devices, so nobody waits for a step in flight. A request is accepted once it is in the journal of
process 0; the others write it down as they hear of it. It is answered once `on_result` returns, and the others write
that down at the next turn, whose coming says so. So the journals of a computation that loses a process have all that it
owes, and fronts that start in the same folders begin with that. A request may be answered twice, with the same tokens.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.device.mesh.peers import watch_peers
from kvjax.device.mesh.processes import ProcessBoard, spans_processes
from kvjax.engine.front.given_prompts import encoded
from kvjax.engine.front.llm_engine import LLMEngine
from kvjax.engine.front.owed_journal import Journal, OwedJournal, newest, read_journal
from kvjax.engine.requests.engine_request import sample_ids
from kvjax.engine.requests.outputs import GenerationResult, StepOutputs, TokenOutput
from kvjax.engine.requests.owed_request import OwedRequest
from kvjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from kvjax.errors import EngineClosedError, UnknownRequestError

logger = logging.getLogger("kvjax.engine")

TURNS_OF_MEETINGS = 256  # all meet, so that what was told before can be taken back
LOOK_S = 0.5  # how often a front without work looks whether all processes are there


class ProcessFront:
    """One for each process, over an engine that nothing else touches. `submit`, `abort` and `close` are for any thread.

    A turn costs process 0 a call of the coordinator's board, and the others one that waits for it.
    """

    def __init__(
        self, engine: LLMEngine, folder: str | Path, *, on_result: Callable[[GenerationResult], None] | None = None
    ) -> None:
        """A front that goes on with what the processes before it owe.

        Args:
            engine: without requests; over one process it has a journal and starts again too.
            folder: for the journal of this process; processes of one host may share it.
            on_result: gets every result on process 0, of requests taken up too, before it counts as answered.

        Raises:
            ValueError: the engine has requests, or a journal is damaged.
            OSError: the folder cannot be written.
        """
        if engine.num_unfinished:
            raise ValueError(f"expected an engine without requests, got {engine.num_unfinished} unfinished")
        self.engine = engine
        is_shared = spans_processes(engine._runner.placement.mesh)
        self._board = ProcessBoard(engine.config.process_timeout_s) if is_shared else None
        self._index = 0 if self._board is None else self._board.index
        self._on_result = on_result
        path = Path(folder) / f"owed-{self._index}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        before = self._meet_with(read_journal(path))
        self._run = before.run + 1
        self._journal = OwedJournal(path, self._run, before.owed.values())
        self.taken_up = tuple(before.owed)  # ids of requests that processes before this one owe
        for one in before.owed.values():
            self._take_up(one)
        if is_shared:
            watch_peers().before_end.append(self._journal.flush)
        self._changed = threading.Condition()  # of what follows
        self._added: list[OwedRequest] = []
        self._aborted: list[str] = []
        self._is_closed = False
        self._num_submitted = 0
        self._results: dict[str, Future[GenerationResult]] = {}
        self._readers: dict[str, Callable[[TokenOutput], None]] = {}
        self._turn = 0
        self._answered: list[str] = []  # not in the journal: process 0 has perhaps not come so far
        self._has_answered = False  # since the last turn, which the others learn by the next
        if self.taken_up:
            logger.warning("goes on with %d requests that processes before this one owe", len(self.taken_up))

    @property
    def takes_requests(self) -> bool:
        """Whether this is process 0."""
        return self._index == 0

    def submit(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        checkpoints: Sequence[int] = (),
        on_output: Callable[[TokenOutput], None] | None = None,
    ) -> list[Future[GenerationResult]]:
        """Accepts a prompt; the result of each sample to be. Arguments as of `LLMEngine.add_request`.

        `on_output` gets every token on the thread of `serve`, which ends if it raises.

        Futures have ValueError where the engine refuses the request, and EngineClosedError where the front ends before.

        Raises:
            ValueError: this is not process 0, an id is taken, text comes without a tokenizer, or there is a matcher.
            EngineClosedError: the front is closed.
            OSError: it cannot be written down. Nothing is changed.
        """
        if not self.takes_requests:
            raise ValueError(f"expected requests on process 0, got one on process {self._index}")
        params = SamplingParams() if params is None else params
        tokens = tuple(np.asarray(encoded(self.engine.model, prompt)).tolist())
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the front is closed; make a new one")
            place = self._num_submitted
            seed = self._seed(place) if params.seed is None else params.seed
            names = sample_ids(f"{self._run}-{place}" if request_id is None else request_id, params.n)
            for name in names:
                if name in self._results or self._journal.owes(name):
                    raise ValueError(f"request id {name!r} is in use; expected a new one")
            requests = [
                OwedRequest(
                    request_id=name,
                    prompt_token_ids=tokens,
                    params=replace(params, n=1, seed=(seed + i) % (MAX_SEED + 1)),
                    cache_salt=cache_salt,
                    lora_name=lora_name,
                    priority=priority,
                    checkpoints=tuple(checkpoints),
                )
                for i, name in enumerate(names)
            ]
            self._journal.accept(requests)
            self._num_submitted += 1
            self._added += requests
            futures: list[Future[GenerationResult]] = [Future() for _ in requests]
            self._results |= dict(zip(names, futures, strict=True))
            if on_output is not None:
                self._readers |= dict.fromkeys(names, on_output)
            self._changed.notify()
        return futures

    def abort(self, request_id: str) -> None:
        """Ends a sample soon, on process 0; one that has ended is none."""
        with self._changed:
            self._aborted.append(request_id)
            self._changed.notify()

    def close(self) -> None:
        """On process 0: takes no more requests; `serve` returns in all processes once everything is answered."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def serve(self) -> None:
        """Runs the engine for all that is submitted, until the front is closed; every process calls it.

        Raises:
            PeerLostError: a process is gone. What is owed is in the journals.
            Exception: whatever a step raises; start all processes again.
        """
        error: BaseException = EngineClosedError("the front has ended; the request is owed, and in its journal")
        try:
            while True:
                turn = self._next_turn()
                self._journal.end(self._answered)
                self._answered = []
                for values in turn["add"]:
                    self._add(OwedRequest.from_json(values))
                for name in turn["abort"]:
                    self._abort(name)
                if self.engine.has_work:
                    self._deliver(self.engine.step())
                elif turn["closed"]:
                    self._journal.end(self._answered)
                    return
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._journal.flush()
            with self._changed:
                self._is_closed = True
                left, self._results = self._results, {}
            for future in left.values():
                future.set_exception(error)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _next_turn(self) -> dict[str, Any]:
        """What all processes do next."""
        self._turn += 1
        topic, board = f"turn {self._turn}", self._board
        if board is None or self._index == 0:
            turn = self._gather()
            if board is not None:
                board.tell(topic, json.dumps(turn, separators=(",", ":")))
        else:
            turn = json.loads(board.hear(topic))
            self._journal.accept([OwedRequest.from_json(values) for values in turn["add"]])
        self._journal.turn = self._turn
        if board is not None and self._turn % TURNS_OF_MEETINGS == 0:
            board.exchange(f"meeting {self._turn}", "")
            if self._index == 0:
                for number in range(self._turn - TURNS_OF_MEETINGS + 1, self._turn + 1):
                    board.forget(f"turn {number}")
        return turn

    def _gather(self) -> dict[str, Any]:
        """What was submitted, once there is anything to do."""
        with self._changed:
            while not (self._added or self._aborted or self._is_closed or self.engine.has_work or self._has_answered):
                self._changed.wait(LOOK_S)
                if self._board is not None:
                    self._board.check_peers()
            added, self._added = self._added, []
            aborted, self._aborted = self._aborted, []
            closed = self._is_closed
            self._has_answered = False
        return {"add": [one.to_json() for one in added], "abort": aborted, "closed": closed}

    def _meet_with(self, own: Journal) -> Journal:
        """What all processes owe together, by the journals that each finds; the same in all."""
        if self._board is None:
            return own
        values = {"run": own.run, "turn": own.turn, "owed": [one.to_json() for one in own.owed.values()]}
        found = []
        for text in self._board.exchange("owed", json.dumps(values, separators=(",", ":"))):
            values = json.loads(text)
            owed = [OwedRequest.from_json(one) for one in values["owed"]]
            found.append(Journal(values["run"], values["turn"], {one.request_id: one for one in owed}))
        return newest(found)

    def _take_up(self, owed: OwedRequest) -> None:
        """Goes on with what the processes before owe, unless this engine can never run it."""
        try:
            self.engine.take_up(owed)
        except ValueError as error:
            logger.error("gives up request %r, which processes before this one owe: %s", owed.request_id, error)
            self._journal.end([owed.request_id])

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _add(self, owed: OwedRequest) -> None:
        try:
            self.engine.take_up(owed)
        except ValueError as error:  # the caller's mistake, in all processes alike
            future = self._results.pop(owed.request_id, None)
            self._readers.pop(owed.request_id, None)
            if future is not None:
                future.set_exception(error)
            self._answered.append(owed.request_id)

    def _abort(self, request_id: str) -> None:
        try:
            self._answer(self.engine.abort(request_id))
        except UnknownRequestError:
            return

    def _deliver(self, outputs: StepOutputs) -> None:
        self._journal.note(outputs)
        if self._readers:
            for output in outputs:
                if output.request_id in self._readers:
                    self._readers[output.request_id](output)
        for result in outputs.results.values():
            self._answer(result)
        if self._index == 0:
            self._journal.end(self._answered)
            self._answered = []

    def _answer(self, result: GenerationResult) -> None:
        if self._index == 0 and self._on_result is not None:
            self._on_result(result)
        with self._changed:
            future = self._results.pop(result.request_id, None)
            self._readers.pop(result.request_id, None)
        if future is not None:
            future.set_result(result)
        self._answered.append(result.request_id)
        self._has_answered = True

    def _seed(self, place: int) -> int:
        own = (self.engine.config.seed, self._run, place)
        return int(np.random.SeedSequence(own).generate_state(1)[0])


__all__ = ["ProcessFront"]

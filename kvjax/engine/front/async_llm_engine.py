"""The engine for asyncio: one thread owns an LLMEngine, callers of any event loop await its tokens.

Flow:    generate, complete -> Admission -> commands -> [engine's thread: LLMEngine] -> Mailbox -> RequestOutputs

    engine = AsyncLLMEngine(LLMEngine.from_folder(folder, config))
    async with engine:
        async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.text, end="")
        async with asyncio.timeout(5):
            [result] = await engine.complete("Hello")

A task that is cancelled, times out or closes its generator aborts its request. At most `max_requests` requests are in
the engine; further callers wait, the most urgent first. Outputs that are not read yet are merged. Without requests the
thread sleeps.

If a step raises, every request of that moment fails with StepFailedError, and the engine serves those that come after.
If the engine is closed by that (EngineClosedError), so is this one. Whatever else ends the thread, every caller gets
an EngineClosedError with the cause, and `start` begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvjax.core.requests.token_ids import as_token_ids
from kvjax.device.mesh.processes import spans_processes
from kvjax.engine.front.async_admission import Admission
from kvjax.engine.front.async_mailbox import Mailbox, RequestOutput
from kvjax.engine.front.llm_engine import LLMEngine
from kvjax.engine.requests.engine_request import sample_ids
from kvjax.engine.requests.outputs import GenerationResult, StepOutputs
from kvjax.engine.requests.request_inputs import as_priority
from kvjax.engine.requests.sampling_params import SamplingParams, checked_params
from kvjax.errors import EngineClosedError, StepFailedError, UnknownRequestError
from kvjax.models import chat_prompt
from kvjax.models.chat import Message

logger = logging.getLogger("kvjax.engine")

NOT_STARTED = "the engine is not started; use `async with` or call start()"
STOPPED = "the engine was stopped; call start() to go on"


@dataclass(frozen=True)
class AsyncEngineStats:
    """Where an AsyncLLMEngine stands: now, and since it was made."""

    num_callers: int  # that wait for room
    num_requests: int  # that have room and have not ended
    num_waiting: int  # of them, in the engine's queue
    num_running: int
    num_steps: int
    num_finished: int
    num_aborted: int
    num_failed: int


class AsyncLLMEngine:
    """An LLMEngine that only this object's thread touches between `start` and `stop`. Methods are for any thread."""

    def __init__(self, engine: LLMEngine, *, max_requests: int | None = None) -> None:
        """A front that is not started yet.

        Args:
            engine: without unfinished requests.
            max_requests: samples that may be in the engine, waiting or running; None: 16 times its `max_num_seqs`.

        Raises:
            ValueError: the engine has requests or runs in several processes, or `max_requests` is below 1.
        """
        if spans_processes(engine._runner.placement.mesh):
            raise ValueError("expected an engine of one process, got one of several; use AsyncProcessFront")
        if engine.num_unfinished:
            raise ValueError(f"expected an engine without requests, got {engine.num_unfinished} unfinished")
        max_requests = 16 * engine.config.max_num_seqs if max_requests is None else max_requests
        if max_requests < 1:
            raise ValueError(f"expected max_requests >= 1, got {max_requests}")
        self.engine = engine
        self._admission = Admission(max_requests)  # of one run of the thread: each start makes another
        self._admission.close(NOT_STARTED)
        self._thread: threading.Thread | None = None
        self._commands: list[Callable[[], None]] = []
        self._open: set[Mailbox] = set()  # of callers who have sent their prompt and still read
        self._is_stopping = True  # or stopped
        self._changed = threading.Condition()  # of the three above
        self._mailboxes: dict[str, tuple[Mailbox, int]] = {}  # and sample, by request id; of the engine's thread
        self._mail_lock = threading.Lock()
        self._num_steps = self._num_finished = self._num_aborted = self._num_failed = 0

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stats(self) -> AsyncEngineStats:
        """Counts, each of about this moment."""
        return AsyncEngineStats(
            num_callers=self._admission.num_callers,
            num_requests=self._admission.num_requests,
            num_waiting=self.engine.scheduler.num_waiting,
            num_running=self.engine.scheduler.num_running,
            num_steps=self._num_steps,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_failed=self._num_failed,
        )

    def start(self) -> None:
        """Starts the thread.

        Raises:
            ValueError: it runs.
            EngineClosedError: a failure closed the engine, and it is still closed.
        """
        if self.is_running:
            raise ValueError("expected an engine that does not run, got one that does; stop it first")
        if self.engine.has_work:  # of requests whose callers have been told
            self.engine.reset()
        self._is_stopping, self._commands = False, []
        self._admission = Admission(self._admission.max_requests)
        self._thread = threading.Thread(target=self._serve, name="kvjax-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Aborts all requests, whose callers get an EngineClosedError, and ends the thread. The engine is free then."""
        self._admission.close(STOPPED)
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **inputs: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """The tokens of a prompt as they come; several in one output where the reader is slow.

        `inputs` are other arguments of `LLMEngine.add_request`; arrays are copied now, before the first token is asked
        for. With `params.n` > 1 outputs of the samples come mixed.

        Raises:
            ValueError: `add_request` refuses the prompt, or there are more samples than `max_requests`.
            StepFailedError: a step of the engine raised while the request was in it, or its own matcher did.
            EngineClosedError: the engine is not started, was stopped, or a failure closed it.
        """
        return self._outputs(_own(prompt), self.engine.with_text(params), as_priority(priority), _own_inputs(inputs))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """`generate` of a chat by the model's own template: arguments and errors of `LLMEngine.add_chat`, too."""
        prompt = chat_prompt(self.engine.model, messages, tools=tools, **(template_variables or {}))
        return self.generate(prompt.token_ids, params, checkpoints=prompt.checkpoints, **inputs)

    def complete(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **inputs: Any,
    ) -> Coroutine[Any, Any, list[GenerationResult]]:
        """The whole result of each sample of a prompt; arguments and errors as of `generate`."""
        return _results(self._outputs(_own(prompt), checked_params(params), as_priority(priority), _own_inputs(inputs)))

    async def _outputs(
        self,
        prompt: str | np.ndarray,
        params: SamplingParams,
        priority: int,
        inputs: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput]:
        admission = self._admission
        await admission.enter(params.n, priority)
        mailbox = Mailbox(params.n, self._mail_lock)
        with self._changed:
            is_sent = admission is self._admission and self._send(
                partial(self._add, mailbox, prompt, params, {"priority": priority, **inputs})
            )
            if is_sent:
                self._open.add(mailbox)
        if not is_sent:
            admission.leave(params.n)
            raise EngineClosedError(STOPPED)
        try:
            while unread := await mailbox.read():
                for output in unread:
                    yield output
        finally:
            with self._changed:
                mailbox.is_closed = True
                self._open.discard(mailbox)
                if not mailbox.has_ended:
                    self._send(partial(self._abandon, mailbox))

    def _send(self, command: Callable[[], None]) -> bool:
        """Has the engine's thread run `command` before its next step; False: it was stopped. `_changed` is held."""
        if not self._is_stopping:
            self._commands.append(command)
            self._changed.notify()
        return not self._is_stopping

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        message, cause = STOPPED, None
        try:
            while commands := self._wait():
                for command in commands:
                    command()
                if self.engine.has_work:
                    self._step()
        except BaseException as error:
            message, cause = f"the engine's thread has ended: {error!r}; call start() to try again", error
            logger.exception("the engine's thread has ended")
        finally:
            self._end(message, cause)

    def _wait(self) -> list[Callable[[], None]] | None:
        """Sleeps until there is something to do: commands, one that does nothing for a step, or None to stop."""
        with self._changed:
            while not (self._commands or self._is_stopping or self.engine.has_work):
                self._changed.wait()
            if self._is_stopping:
                return None
            commands, self._commands = self._commands, []
        return commands or [_nothing]

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            logger.exception("a step failed; its requests fail with it")
            self.engine.reset()
            message = f"a step of the engine failed, and this request with it: {error!r}; it may be sent again"
            self._fail_all(StepFailedError, message, error)
            return
        self._num_steps += 1
        self._deliver(outputs)

    def _deliver(self, outputs: StepOutputs) -> None:
        woken: dict[Mailbox, None] = {}
        failed: dict[Mailbox, Exception] = {}
        with self._mail_lock:
            for output in outputs:
                mailbox, sample = self._mailboxes[output.request_id]
                if output.result is not None and output.result.error is not None:
                    failed[mailbox] = output.result.error
                else:
                    mailbox.put(sample, output)
                woken[mailbox] = None
        for result in outputs.results.values():
            del self._mailboxes[result.request_id]
        num_failed = sum(result.error is not None for result in outputs.results.values())
        self._num_failed += num_failed
        self._num_finished += len(outputs.results) - num_failed
        self._admission.leave(len(outputs.results))
        for mailbox, error in failed.items():
            self._abandon(mailbox)  # its other samples
            with self._mail_lock:
                mailbox.fail(
                    _failed(StepFailedError, f"the request's own matcher or tokenizer failed: {error!r}", error)
                )
        self._wake(list(woken))

    def _add(
        self,
        mailbox: Mailbox,
        prompt: str | np.ndarray,
        params: SamplingParams,
        inputs: dict[str, Any],
    ) -> None:
        num_samples = mailbox.num_unfinished
        if mailbox.is_closed:
            self._admission.leave(num_samples)
            mailbox.num_unfinished = 0
            return
        try:
            first = self.engine.add_request(prompt, params, **inputs)
        except Exception as error:  # the caller's mistake
            self._admission.leave(num_samples)
            with self._mail_lock:
                mailbox.fail(error)
            self._wake([mailbox])
            return
        mailbox.request_ids = sample_ids(first, num_samples)
        self._mailboxes.update({name: (mailbox, i) for i, name in enumerate(mailbox.request_ids)})

    def _abandon(self, mailbox: Mailbox) -> None:
        """Aborts what is unfinished of a mailbox that nobody reads."""
        for request_id in mailbox.request_ids:
            if request_id in self._mailboxes and self._mailboxes[request_id][0] is mailbox:  # not a later one's
                del self._mailboxes[request_id]
                self.engine.abort(request_id)
                self._num_aborted += 1
                self._admission.leave()
        mailbox.num_unfinished = 0

    def _wake(self, mailboxes: list[Mailbox]) -> None:
        """Wakes the readers, each event loop once. Those of closed loops are abandoned."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, own)
            except RuntimeError:  # the loop is closed
                for mailbox in own:
                    self._abandon(mailbox)

    def _fail_all(self, kind: type[Exception], message: str, cause: BaseException | None = None) -> None:
        """Every request that the engine has, or had, ends with an error of its own."""
        mailboxes = dict.fromkeys(mailbox for mailbox, _ in self._mailboxes.values())
        num_requests = len(self._mailboxes)
        self._mailboxes.clear()
        with self._mail_lock:
            for mailbox in mailboxes:
                mailbox.fail(_failed(kind, message, cause))
        self._num_failed += num_requests
        self._admission.leave(num_requests)
        self._wake(list(mailboxes))

    def _end(self, message: str, cause: BaseException | None) -> None:
        """Nothing of any caller is left, in the engine or on the way to it, and every caller is told."""
        self._admission.close(message)
        with self._changed:
            self._is_stopping, self._commands = True, []
            mailboxes, self._open = list(self._open), set()
        try:
            for request_id in self._mailboxes:
                with suppress(EngineClosedError, UnknownRequestError):
                    self.engine.abort(request_id)
        except Exception:
            logger.exception("requests are left in the engine; start() resets it")
        finally:
            self._mailboxes.clear()
            with self._mail_lock:
                for mailbox in mailboxes:
                    self._num_failed += mailbox.num_unfinished
                    mailbox.fail(_failed(EngineClosedError, message, cause))
            self._admission.free()
            self._wake(mailboxes)


def _failed(kind: type[Exception], message: str, cause: BaseException | None) -> Exception:
    error = kind(message)
    error.__cause__ = cause
    return error


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


async def _results(outputs: AsyncGenerator[RequestOutput]) -> list[GenerationResult]:
    """The results of all samples, in their order."""
    results = {output.sample: output.result async for output in outputs if output.result is not None}
    return [results[sample] for sample in sorted(results)]


def _own(prompt: str | Sequence[int] | np.ndarray) -> str | np.ndarray:
    """A prompt that its caller cannot change any more: the engine's thread reads it later."""
    return prompt if isinstance(prompt, str) else as_token_ids(np.array(prompt), "prompt_token_ids")


def _own_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise of all other arguments of `add_request`.

    Raises:
        ValueError: one cannot be copied.
    """
    try:
        return deepcopy(dict(inputs))
    except Exception as error:  # whatever objects they hold
        raise ValueError(f"expected inputs of a prompt that can be copied: {error!r}") from error


def _nothing() -> None:
    pass


__all__ = ["AsyncEngineStats", "AsyncLLMEngine", "RequestOutput"]

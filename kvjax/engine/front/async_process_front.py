"""Requests of asyncio for an engine that runs in several processes: `AsyncLLMEngine.generate` over a `ProcessFront`.

Flow:    generate, complete -> ProcessFront.submit -> [a Mailbox for each prompt] <- tokens, on the thread of `serve`

    front = ProcessFront(engine, "owed")
    if front.takes_requests:                      # process 0
        requests = AsyncProcessFront(front)       # `async for output in requests.generate("Once upon a time")`
    front.serve()                                 # every process, not on the thread of the event loop

Who leaves has its request aborted, in all processes. A request whose reader is gone with its process is answered by
the processes that start next, through `on_result` alone.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvjax.engine.front.async_admission import Admission
from kvjax.engine.front.async_mailbox import Mailbox, RequestOutput
from kvjax.engine.front.process_front import ProcessFront
from kvjax.engine.requests.engine_request import sample_ids
from kvjax.engine.requests.outputs import FinishReason, GenerationResult, TokenOutput
from kvjax.engine.requests.request_inputs import as_priority
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.errors import StepFailedError


class AsyncProcessFront:
    """Readers of one front's requests, of any event loops; each encodes its prompt in its own."""

    def __init__(self, front: ProcessFront, *, max_requests: int | None = None) -> None:
        """Over the front of process 0, which something else serves and closes.

        Args:
            front: whose requests these are.
            max_requests: samples that may be in the front, waiting or running; None: 16 times the engine's
                `max_num_seqs`. Further callers wait, the most urgent first.

        Raises:
            ValueError: it is that of another process, or `max_requests` is below 1.
        """
        if not front.takes_requests:
            raise ValueError("expected the front of process 0, got one of another process, which only serves")
        max_requests = 16 * front.engine.config.max_num_seqs if max_requests is None else max_requests
        if max_requests < 1:
            raise ValueError(f"expected max_requests >= 1, got {max_requests}")
        self._front = front
        self._admission = Admission(max_requests)
        self._lock = threading.Lock()  # of all mailboxes

    def generate(
        self, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams | None = None, **arguments: Any
    ) -> AsyncGenerator[RequestOutput]:
        """The tokens of a prompt as they come; several in one output where the reader is slow.

        `arguments` are those of `ProcessFront.submit`. The prompt is submitted once the first output is asked for.

        Raises:
            ValueError: `submit` or the engine refuses the prompt, or there are more samples than `max_requests`.
            StepFailedError: the request's own tokenizer failed, or its logits were no numbers.
            EngineClosedError: the front is closed, or ended before the request did.
            PeerLostError: a process is gone. The request is owed.
        """
        return self._outputs(prompt, self._front.engine.with_text(params), arguments)

    async def complete(
        self, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams | None = None, **arguments: Any
    ) -> list[GenerationResult]:
        """The whole result of each sample of a prompt; arguments and errors as of `generate`."""
        outputs = self.generate(prompt, params, **arguments)
        results = {output.sample: output.result async for output in outputs if output.result is not None}
        return [results[sample] for sample in sorted(results)]

    async def _outputs(
        self, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams, arguments: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput]:
        await self._admission.enter(params.n, as_priority(arguments.get("priority", 0)))
        mailbox = Mailbox(params.n, self._lock)
        first = arguments.pop("request_id", None) or secrets.token_hex(8)
        mailbox.request_ids = sample_ids(first, params.n)
        put = partial(self._put, mailbox, {name: i for i, name in enumerate(mailbox.request_ids)})
        try:
            futures = self._front.submit(prompt, params, request_id=first, on_output=put, **arguments)
        except BaseException:
            self._admission.leave(params.n)
            raise
        for sample, future in enumerate(futures):
            future.add_done_callback(partial(self._end, mailbox, sample))
        try:
            while unread := await mailbox.read():
                for output in unread:
                    yield output
        finally:
            if not mailbox.has_ended:
                for name in mailbox.request_ids:
                    self._front.abort(name)

    # -- the thread of `serve` -----------------------------------------------------------------------------------------

    def _put(self, mailbox: Mailbox, samples: dict[str, int], output: TokenOutput) -> None:
        if output.result is None or output.result.error is None:
            with self._lock:
                mailbox.put(samples[output.request_id], output)
            _wake(mailbox)

    def _end(self, mailbox: Mailbox, sample: int, future: Future[GenerationResult]) -> None:
        """A sample has ended: with its last token, which is there already, or by itself."""
        self._admission.leave()
        error = future.exception()
        with self._lock:
            if error is not None:
                mailbox.fail(error)
            elif (cause := future.result().error) is not None:
                failure = StepFailedError(f"the request's own tokenizer failed, or its logits: {cause!r}")
                failure.__cause__ = cause
                mailbox.fail(failure)
            elif future.result().finish_reason is FinishReason.ABORT:
                mailbox.end(sample, future.result())
        _wake(mailbox)


def _wake(mailbox: Mailbox) -> None:
    with suppress(RuntimeError):  # the loop is closed, and with it the generator, which aborts
        mailbox.loop.call_soon_threadsafe(mailbox.wake)


__all__ = ["AsyncProcessFront"]

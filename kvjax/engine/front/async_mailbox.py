"""What one caller of an AsyncLLMEngine has not read yet: one output a sample, which later tokens are added to.

Flow:    engine's thread: StepOutputs -> [Mailbox] -> caller's event loop: RequestOutput after RequestOutput

A reader that is slow finds several tokens in its next output, and stalls nobody. The engine's thread writes and any
event loop reads, both under the lock that all mailboxes of an engine share; `wake` runs in the reader's loop.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from kvjax.engine.requests.outputs import GenerationResult, TokenOutput, TopLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """New tokens of one sample of a prompt: at least one, but for a sample that another aborted."""

    request_id: str
    sample: int  # of the prompt, 0 where it has but one
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str | None  # what the tokens complete; None: the model has no tokenizer
    result: GenerationResult | None  # None: the sample goes on
    top_logprobs: TopLogprobs | None = None  # of the tokens; None: not asked for (`logprobs`)


@dataclass
class _Unread:
    """Output of one sample that nobody has read."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    result: GenerationResult | None = None


class Mailbox:
    """Outputs of one prompt for one caller. Made in the caller's event loop."""

    def __init__(self, num_samples: int, lock: threading.Lock) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_ids: list[str] = []  # of the samples, once the engine has them
        self.num_unfinished = num_samples  # as far as the engine's thread knows
        self.is_closed = False  # nobody reads any more
        self._lock = lock
        self._event = asyncio.Event()
        self._unread: dict[int, _Unread] = {}  # by sample
        self._num_unread_ends = num_samples  # results that the reader has not got
        self._error: BaseException | None = None

    # -- the engine's thread, which holds the lock ---------------------------------------------------------------------

    def put(self, sample: int, output: TokenOutput) -> None:
        """Adds a token to what is unread."""
        unread = self._unread.setdefault(sample, _Unread())
        unread.token_ids.append(output.token_id)
        unread.logprobs.append(output.logprob)
        if output.text is not None:
            unread.texts.append(output.text)
        if output.top_logprobs is not None:
            unread.top_logprobs.append(output.top_logprobs)
        unread.result = output.result
        self.num_unfinished -= output.result is not None

    def end(self, sample: int, result: GenerationResult) -> None:
        """A sample ended without another token."""
        self._unread.setdefault(sample, _Unread()).result = result
        self.num_unfinished -= 1

    def fail(self, error: BaseException) -> None:
        """The reader gets this once it has read what there is."""
        self._error = error
        self.num_unfinished = 0

    # -- the reader's event loop ---------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the reader has the results of all samples."""
        return not self._num_unread_ends

    def wake(self) -> None:
        """There is something to read."""
        self._event.set()

    async def read(self) -> list[RequestOutput]:
        """What is unread, once there is any, an output a sample; empty: all samples have ended.

        Raises:
            BaseException: what the engine's thread failed with.
        """
        while self._num_unread_ends:
            with self._lock:
                unread, self._unread = self._unread, {}
                error = self._error
                self._event.clear()
            if unread:
                return [self._output(sample, one) for sample, one in unread.items()]
            if error is not None:
                raise error
            await self._event.wait()
        return []

    def _output(self, sample: int, unread: _Unread) -> RequestOutput:
        self._num_unread_ends -= unread.result is not None
        best = unread.top_logprobs
        return RequestOutput(
            request_id=self.request_ids[sample],
            sample=sample,
            token_ids=tuple(unread.token_ids),
            logprobs=tuple(unread.logprobs),
            text="".join(unread.texts) if unread.texts else None,
            result=unread.result,
            top_logprobs=TopLogprobs.joined(best, best[0].token_ids.shape[1]) if best else None,
        )


__all__ = ["Mailbox", "RequestOutput"]

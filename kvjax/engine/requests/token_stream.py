"""Tokens of some prompts as they come: what `LLMEngine.stream` returns.

Flow:    LLMEngine steps -> [StreamInbox] -> [TokenStream] -> StreamOutput after StreamOutput

The stream makes the engine step when it has nothing more to return. Several streams share the steps: each step's
outputs go to the inboxes of all of them. A stream that nobody refers to any more is taken for closed; its requests are
aborted by the engine's next call, since Python may find that out in the middle of any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from kvjax.engine.requests.outputs import GenerationResult, StepOutputs, TopLogprobs


@dataclass(frozen=True)
class StreamOutput:
    """A new token of one prompt."""

    prompt: int  # place among the prompts
    sample: int  # of the prompt, 0 where it has but one
    request_id: str
    token_id: int
    logprob: float
    text: str | None  # what the token completes, which may be empty; None: the model has no tokenizer
    result: GenerationResult | None  # None: the request goes on
    top_logprobs: TopLogprobs | None = None  # of the one token; None: not asked for (`logprobs`)


class StreamInbox:
    """Outputs of steps for the requests of one reader. Held by the engine, read by a stream or by `generate`."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int]] = {}  # prompt and sample, by request id
        self.is_closed = False  # nobody reads: what is unfinished is to be aborted
        self._steps: deque[StepOutputs] = deque()
        self._newest: StepOutputs | None = None

    def put(self, outputs: StepOutputs) -> None:
        """Adds a step's outputs, once if it is told of them twice."""
        if outputs is not self._newest:
            self._steps.append(outputs)
            self._newest = outputs

    def take(self) -> Iterator[StepOutputs]:
        """The steps that were not taken, oldest first."""
        while self._steps:
            yield self._steps.popleft()

    def placed(self, result: GenerationResult) -> GenerationResult:
        """The result with its prompt's place; as it is where the request is another reader's."""
        place = self.places.get(result.request_id)
        return result if place is None else replace(result, prompt=place[0])


class TokenStream(Iterator[StreamOutput]):
    """An iterator over the tokens of all prompts, in the order in which they are made.

    To close it, by `close`, a `with` block or an exception in a step, aborts what is unfinished. Used by the engine's
    thread.
    """

    def __init__(
        self,
        inbox: StreamInbox,
        *,
        advance: Callable[[], bool],  # runs a step; False: there is none to run
        sweep: Callable[[], object],  # aborts the requests of closed inboxes
    ) -> None:
        self._inbox = inbox
        self._advance = advance
        self._sweep = sweep
        self._ready: deque[StreamOutput] = deque()
        self._num_unfinished = len(inbox.places)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamOutput:
        """The next token.

        Raises:
            Exception: whatever a step raises, or the own matcher of a request; the stream is closed.
        """
        while not self._ready:
            if self._inbox.is_closed or not self._num_unfinished:
                self._inbox.is_closed = True
                raise StopIteration
            try:
                has_more = self._advance()
                for outputs in self._inbox.take():
                    self._read(outputs)
            except BaseException:
                self.close()
                raise
            if not has_more and not self._ready:  # the rest was aborted by its ids
                self._inbox.is_closed = True
        output = self._ready.popleft()
        if output.result is not None and output.result.error is not None:
            self.close()
            output.result.checked()
        return output

    def close(self) -> None:
        """Aborts what is unfinished; nothing more comes. Closing twice is once."""
        self._ready.clear()
        self._inbox.is_closed = True
        self._sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._inbox.is_closed = True

    def _read(self, outputs: StepOutputs) -> None:
        places = self._inbox.places
        for output in outputs:
            place = places.get(output.request_id)
            if place is None:
                continue
            self._num_unfinished -= output.result is not None
            self._ready.append(
                StreamOutput(
                    *place,
                    output.request_id,
                    output.token_id,
                    output.logprob,
                    output.text,
                    None if output.result is None else self._inbox.placed(output.result),
                    output.top_logprobs,
                )
            )


__all__ = ["StreamInbox", "StreamOutput", "TokenStream"]

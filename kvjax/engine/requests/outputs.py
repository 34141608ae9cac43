"""What the engine returns: tokens as they come, and an ended request as a whole.

Flow:    LLMEngine.step -> [StepOutputs] -> caller; a request's last token brings its [GenerationResult]
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from kvjax.engine.requests.stats import RequestStats


class FinishReason(enum.Enum):
    """Why a request ended."""

    LENGTH = "length"  # max_tokens reached
    STOP = "stop"  # a stop token, the end of the sequence, or a stop string
    ABORT = "abort"
    ERROR = "error"  # its own matcher or tokenizer raised, or its logits were NaN or infinite


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The k best tokens at n tokens, the best first, under the model: before temperature, penalties and masks."""

    token_ids: np.ndarray  # int32[n, k]
    logprobs: np.ndarray  # float32[n, k]
    ranks: np.ndarray  # int32[n] of the tokens themselves, 1: none is more likely

    @classmethod
    def joined(cls, parts: Sequence[TopLogprobs], k: int) -> TopLogprobs:
        """The rows of all parts, one after another."""
        empty = cls(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32), np.zeros(0, np.int32))
        columns = ([getattr(part, name) for part in (empty, *parts)] for name in ("token_ids", "logprobs", "ranks"))
        return cls(*map(np.concatenate, columns))


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """What the model makes of a prompt's n tokens, each after those before it. The first has none: NaN, ids -1."""

    logprobs: np.ndarray  # float32[n] of the tokens themselves
    top: TopLogprobs


@dataclass(frozen=True)
class GenerationResult:
    """One request, ended.

    `text` begins where the decoding of prompt and output begins to differ from the prompt's, and ends at a stop string.
    Where the output changes nothing of the prompt's text, the two texts one after another are the decoding of all.
    """

    request_id: str
    prompt_token_ids: np.ndarray  # int32[num_prompt_tokens]
    output_token_ids: np.ndarray  # int32[num_output_tokens]
    logprobs: tuple[float, ...]  # log-probability of each output token under the model, before temperature and masks
    finish_reason: FinishReason
    stats: RequestStats
    text: str | None = None  # what the decoding of prompt and output has behind the prompt's; None: no tokenizer
    top_logprobs: TopLogprobs | None = None  # of each output token; None: not asked for (`SamplingParams.logprobs`)
    prompt_logprobs: PromptLogprobs | None = None  # None: not asked for; NaN: of tokens that were not computed
    error: Exception | None = None  # what ended it: its own matcher or tokenizer raised, or its logits were no numbers
    sample: int = 0  # of its prompt (`SamplingParams.n`)
    prompt: int | None = None  # place among the prompts of `generate` or `stream`; None: queued by `add_request`

    def checked(self) -> GenerationResult:
        """The result.

        Raises:
            Exception: what ended the request.
        """
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True)
class TokenOutput:
    """A request's new token of one step."""

    request_id: str
    token_id: int
    logprob: float
    result: GenerationResult | None  # None: the request goes on
    text: str | None = None  # what the token completes, which may be empty; None: not asked for (`stream_text`)
    top_logprobs: TopLogprobs | None = None  # of the one token; None: not asked for (`logprobs`)


@dataclass(frozen=True, eq=False)
class StepOutputs(Sequence[TokenOutput]):
    """The new tokens of one step, as columns; a sequence of `TokenOutput`, each made when it is asked for.

    With speculation a request may have several of them, which stand side by side in their order; a result stands at
    its request's last. Reading columns costs nothing a token, so that is the way for many requests.
    """

    request_ids: np.ndarray  # object[n] text
    token_ids: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    results: Mapping[int, GenerationResult]  # of the requests that ended, by place in the columns
    texts: Mapping[int, str] = field(default_factory=dict)  # of those that stream text, by place
    top_logprobs: Mapping[int, TopLogprobs] = field(default_factory=dict)  # of those that ask for them, by place

    def __len__(self) -> int:
        return self.token_ids.size

    @overload
    def __getitem__(self, index: int) -> TokenOutput: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenOutput]: ...

    def __getitem__(self, index: int | slice) -> TokenOutput | list[TokenOutput]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return TokenOutput(
            self.request_ids[place],
            self.token_ids.item(place),
            self.logprobs.item(place),
            self.results.get(place),
            self.texts.get(place),
            self.top_logprobs.get(place),
        )

    def __iter__(self) -> Iterator[TokenOutput]:
        columns = zip(self.request_ids.tolist(), self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        for place, (request_id, token_id, logprob) in enumerate(columns):
            more = (self.results.get(place), self.texts.get(place), self.top_logprobs.get(place))
            yield TokenOutput(request_id, token_id, logprob, *more)


NO_OUTPUTS = StepOutputs(np.zeros(0, np.object_), np.zeros(0, np.int32), np.zeros(0, np.float32), {})

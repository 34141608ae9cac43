"""A request inside the engine: the core's `Request`, how to sample it, where it stands and what it cost.

Flow:    LLMEngine.add_request -> [EngineRequest] -> Scheduler queues -> RequestStats, RequestOutput

States:

    waiting    submitted or preempted; owns no row and no blocks
    loading    its blocks are filled from beyond the pools; owns a row and blocks, and no step computes it
    running    admitted; owns a row and blocks
    finished   ended by its length, a stop token or an abort; owns nothing

A matcher and a tokenizer are code of the request's own. What they raise is noted in `error`, ends the request with its
next token, and is the fault of no step: other requests, and what is cached, stay as they are. So it is where the
model's logits of a request are NaN or infinite.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvjax.core import Request
from kvjax.engine.requests.output_text import OutputText
from kvjax.engine.requests.outputs import FinishReason, PromptLogprobs, TopLogprobs
from kvjax.engine.requests.request_inputs import NO_INPUTS, RequestInputs
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.requests.token_matcher import TokenMatcher
from kvjax.errors import NonFiniteLogitsError


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class EngineRequest:
    """One request, owned by the engine's thread. Its `priority` and `arrival` are together those of no other."""

    request: Request
    params: SamplingParams
    seed: int  # the one that sampling uses
    stop_token_ids: frozenset[int]  # of the params and, unless ignored, of the model
    arrival: int  # number of requests queued before it
    stats: RequestStats
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)  # one per output token; while it runs, of those before it did
    inputs: RequestInputs = NO_INPUTS
    sample: int = 0  # of its prompt
    first_sample: EngineRequest | None = None  # of the same prompt, which that one computes for both
    priority: int = 0  # lower is more urgent
    text: OutputText | None = None  # None: the model has no tokenizer
    matcher: TokenMatcher | None = None
    num_shown: int = 0  # output tokens that text and matcher have seen
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # of each output token, if asked for
    has_failed_load: bool = False  # waits again since what it was to load could not be had
    error: Exception | None = None  # that code of the request's own raised, which ends it and nothing else
    prompt_logprobs: PromptLogprobs | None = None  # the same object for all samples of a prompt; None: not asked for

    @property
    def request_id(self) -> str:
        """Id that the caller gave."""
        return self.request.request_id

    @property
    def urgency(self) -> tuple[int, int]:
        """What requests are ordered by, the most urgent first."""
        return self.priority, self.arrival

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output at most."""
        return self.request.num_prompt_tokens + self.params.max_tokens

    @property
    def has_other_samples(self) -> bool:
        """Whether it is the first of several samples."""
        return self.params.n > 1 and self.first_sample is None

    def has_computed_just(self, num_tokens: int) -> bool:
        """Whether it runs, has computed so many tokens of its prompt, and has no token beyond the prompt."""
        request = self.request
        is_prompt = request.num_tokens == request.num_prompt_tokens
        return self.status is RequestStatus.RUNNING and is_prompt and request.num_computed_tokens == num_tokens

    @property
    def waits_for_first_sample(self) -> bool:
        """Whether the first sample of its prompt is still at computing it."""
        first = self.first_sample
        if first is None or first.status not in (RequestStatus.LOADING, RequestStatus.RUNNING):
            return False
        return first.request.num_computed_tokens < first.request.num_prompt_tokens

    @property
    def is_followed(self) -> bool:
        """Whether each of its tokens is shown to `finish_reason_after`, and not only those that may be the last."""
        return self.matcher is not None or self.error is not None or bool(self.params.logprobs) or self._has_text

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the request ends with `token_id`, its newest output token; None: it goes on."""
        num_tokens = self.request.num_output_tokens
        is_last = num_tokens >= self.params.max_tokens
        if num_tokens > self.num_shown:
            self._show([token_id], is_last)
            self.num_shown = num_tokens
        if self.error is not None:
            return FinishReason.ERROR
        is_stop = token_id in self.stop_token_ids and num_tokens >= self.params.min_tokens
        if is_stop or (self.text is not None and self.text.is_stopped):
            return FinishReason.STOP
        return FinishReason.LENGTH if is_last else None

    def refuse_logits(self) -> None:
        """Notes that the scores of its newest token were no numbers, which ends it."""
        self.error = self.error or NonFiniteLogitsError(
            f"expected finite logits of request {self.request_id!r} at token {self.request.num_tokens - 1}, got NaN or "
            "infinity: load_model names a weight that is not finite; if all are, try dtype='float32', or find the "
            "operation with jax_debug_nans"
        )

    def show_again(self) -> None:
        """Text, matcher and the best tokens follow the output tokens there are, whatever they followed before."""
        token_ids = self.request.output_token_ids.tolist()
        self.top_logprobs = self.top_logprobs[: len(token_ids)]
        if not self.is_followed:
            return
        self.error = None
        try:
            self.text = None if self.text is None else self.text.restarted()
            self.matcher = None if self.params.token_matcher is None else self.params.token_matcher()
        except Exception as error:
            self.error = error
        self._show(token_ids)
        if self.text is not None:
            self.text.take()
        self.num_shown = len(token_ids)

    def go_on_from(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Has these output tokens, and their log-probabilities, before it is queued."""
        if token_ids:
            self.request.append_output_token_ids(token_ids)
            self.logprobs = list(logprobs)
            self.show_again()

    def fill_bitmask(self, words: np.ndarray) -> None:  # int32[ceil(vocab_size / 32)]
        """As the matcher does; all bits set where it raises."""
        assert self.matcher is not None
        words[:] = -1
        try:
            self.matcher.fill_bitmask(words)
        except Exception as error:
            self.error = error
            words[:] = -1

    def whole_text(self) -> str | None:
        """The text of the ended request; None: there is no tokenizer, or it raised."""
        try:
            return None if self.text is None else self.text.whole(self.output_token_ids())
        except Exception as error:
            self.error = self.error or error
            return None

    @property
    def _has_text(self) -> bool:
        return self.text is not None and self.text.is_followed

    def _show(self, token_ids: Iterable[int], is_last: bool = False) -> None:
        """Shows new tokens to matcher and text; `is_last`: none comes behind them."""
        try:
            for token_id in token_ids:
                if self.matcher is not None:
                    self.matcher.accept_token(token_id)
                if self.text is not None and self.text.is_followed:
                    self.text.push(token_id)
            if is_last and self.text is not None and self.text.is_followed:
                self.text.finish()  # which may bring a stop string
        except Exception as error:
            self.error = self.error or error

    def output_token_ids(self) -> np.ndarray:  # int32[num_output_tokens]
        """A copy of the tokens sampled so far."""
        return np.array(self.request.output_token_ids, np.int32)


def sample_ids(request_id: str, n: int) -> list[str]:
    """Ids of the `n` samples of a prompt that is queued as `request_id`."""
    return [request_id, *(f"{request_id}.{i}" for i in range(1, n))]

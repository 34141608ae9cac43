"""Log-probabilities of prompts, gathered from the steps that compute them.

Flow:    StepPlan -> [PromptScores.ask] -> GivenTokens -> device -> [GivenTokens.put] -> PromptLogprobs of a result

The token at place p is scored by the logits of the token before it, so a prompt's first has no log-probability, and
what its last token says is the output's. All is kept by place: a prompt that is computed again, or by several samples,
writes the same again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.core import StepPlan
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.outputs import PromptLogprobs, TopLogprobs


@dataclass(frozen=True)
class GivenTokens:
    """Tokens of prompts whose log-probabilities a step gives."""

    token_ids: np.ndarray  # int32[T] behind each of the step's tokens, -1: not asked for
    chunks: tuple[tuple[PromptLogprobs, int, int, int], ...]  # whose, first of the step's tokens, first place, how many

    def put(self, logprobs: np.ndarray, best: TopLogprobs) -> None:
        """Keeps what the device gave: float32[>= T] of the tokens, and the best."""
        for kept, start, place, count in self.chunks:
            source, target, k = slice(start, start + count), slice(place, place + count), kept.top.token_ids.shape[1]
            kept.logprobs[target] = logprobs[source]
            kept.top.token_ids[target] = best.token_ids[source, :k]
            kept.top.logprobs[target] = best.logprobs[source, :k]
            kept.top.ranks[target] = best.ranks[source]


class PromptScores:
    """The running requests that ask, by id; costs nothing without any."""

    def __init__(self) -> None:
        self._requests: dict[str, EngineRequest] = {}

    def start(self, request: EngineRequest) -> None:
        """A request begins to compute its prompt."""
        if request.prompt_logprobs is not None:
            self._requests[request.request_id] = request

    def ask(self, plan: StepPlan) -> GivenTokens | None:
        """What a step is asked for; None: nothing. Requests that run no more are forgotten."""
        if not self._requests:
            return None
        token_ids, chunks = np.full(plan.num_tokens, -1, np.int32), []
        for name, one in list(self._requests.items()):
            if one.request.row < 0 or one.request.num_computed_tokens >= one.request.num_prompt_tokens:
                del self._requests[name]
                continue
            for i in np.flatnonzero(plan.rows == one.request.row).tolist():
                start, place = plan.query_start_loc.item(i), plan.num_computed_tokens.item(i) + 1
                given = one.request.prompt_token_ids[place : place + plan.num_new_tokens.item(i)]
                if given.size and one.prompt_logprobs is not None:
                    token_ids[start : start + given.size] = given
                    chunks.append((one.prompt_logprobs, start, place, given.size))
        return GivenTokens(token_ids, tuple(chunks)) if chunks else None


def no_prompt_logprobs(num_tokens: int, k: int | None) -> PromptLogprobs | None:
    """For a prompt of which nothing is known yet; None: not asked for."""
    if k is None:
        return None
    nan = np.float32(np.nan)
    top = TopLogprobs(
        np.full((num_tokens, k), -1, np.int32), np.full((num_tokens, k), nan), np.zeros(num_tokens, np.int32)
    )
    return PromptLogprobs(np.full(num_tokens, nan), top)


__all__ = ["GivenTokens", "PromptScores", "no_prompt_logprobs"]
